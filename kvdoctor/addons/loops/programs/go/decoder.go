// Package decodeloop decodes with an ONNX decoder that has a KV cache. What the loop does is not in its code: it is read
// from a contract.json, which kvdoctor writes for a model.
//
//	contract, err := decodeloop.ReadContract("contract.json")
//	d, err := decodeloop.Open("path/to/the/model", contract, decodeloop.Options{})
//	defer d.Close()
//	tokens, err := d.Generate(ctx, [][]int64{{5, 6, 7}}, decodeloop.Generation{Most: 20})
package decodeloop

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"

	ort "github.com/yalue/onnxruntime_go"
)

// Options say how a model is opened.
type Options struct {
	Session   *ort.SessionOptions // threads and execution provider; nil is the CPU
	Capacity  int64               // room of the cache in tokens, where the contract lets it be chosen; 0 is 512
	Unchecked bool                // do not open each file once more to compare it with the contract
}

// Decoder holds a model, and the cache of one batch of sequences. A program may have several, of one or of several
// models. Each serves one goroutine at a time.
//
// The binding copies each output into memory of Go once; from then on the cache goes from step to step without a copy,
// but for the parts that the contract has the loop put together. A value is destroyed as soon as the next one is there.
//
// A call that fails leaves the sequences as they were, but for Prefill and Encode: after these there are none.
type Decoder struct {
	contract *Contract
	graphs   map[string]*graph // by file
	reserved map[*Call][]room
	capacity int64

	trace io.Writer
	run   string

	// What Encode was given, and what the encoder made of it. The next sequences begin with these as well.
	source     ort.Value
	sourceMask *table
	encoded    map[string]ort.Value

	// The sequences.
	length  int64                // tokens in the cache, padding counted
	padding []int64              // of each sequence, on the left
	history [][]int64            // the tokens of each sequence, without padding
	cache   map[string]ort.Value // by the names of the pasts
	states  ort.Value            // encoder states
	mask    *table               // of the source
}

// Open opens the files of a model in a folder.
func Open(folder string, contract *Contract, options Options) (*Decoder, error) {
	if err := LoadRuntime(); err != nil {
		return nil, err
	}
	capacity := options.Capacity
	if !contract.CapacityIsChosen {
		capacity = contract.ContextLimit
	} else if capacity == 0 {
		capacity = 512
	}
	if capacity < 0 {
		return nil, errors.New("the cache needs room for at least one token")
	}
	d := &Decoder{contract: contract, capacity: capacity, graphs: map[string]*graph{}}
	d.reserved = map[*Call][]room{}
	d.encoded, d.cache = map[string]ort.Value{}, map[string]ort.Value{}
	if !options.Unchecked {
		if err := contract.compare(folder); err != nil {
			return nil, err
		}
	}
	for _, call := range contract.calls() {
		if err := d.open(folder, call, options.Session); err != nil {
			d.Close()
			return nil, err
		}
	}
	return d, nil
}

func (d *Decoder) open(folder string, call *Call, options *ort.SessionOptions) error {
	if d.graphs[call.File] == nil {
		graph := &graph{file: call.File, outputs: call.Outputs, inputs: slices.Clone(call.Pasts)}
		for _, one := range call.Inputs {
			graph.inputs = append(graph.inputs, one.Name)
		}
		path := filepath.Join(folder, call.File)
		session, err := ort.NewDynamicAdvancedSession(path, graph.inputs, graph.outputs, options)
		if err != nil {
			return fmt.Errorf("open %q: %w", path, err)
		}
		graph.session = session
		d.graphs[call.File] = graph
		if graph.options, err = ort.NewRunOptions(); err != nil {
			return err
		}
	}
	d.reserved[call] = d.rooms(call)
	for _, one := range d.reserved[call] {
		if err := d.countable(call, one); err != nil {
			return fmt.Errorf("the binding for Go must know the size of output %q before a call: %w", one.name, err)
		}
	}
	return nil
}

// Close releases the cache and the sessions.
func (d *Decoder) Close() {
	d.Reset()
	for _, graph := range d.graphs {
		graph.session.Destroy()
		if graph.options != nil {
			graph.options.Destroy()
		}
	}
	clear(d.graphs)
}

// Length is the number of tokens in the cache, padding counted.
func (d *Decoder) Length() int64 { return d.length }

// History is the tokens in the cache of each sequence, without padding.
func (d *Decoder) History() [][]int64 {
	rows := make([][]int64, len(d.history))
	for i, row := range d.history {
		rows[i] = slices.Clone(row)
	}
	return rows
}

// MostTokens is the most tokens that a sequence may have, padding counted; 0 where nothing limits them.
func (d *Decoder) MostTokens() int64 {
	if limit := d.contract.ContextLimit; limit != 0 && (d.capacity == 0 || limit < d.capacity) {
		return limit
	}
	return d.capacity
}

// Reset begins anew: no sequences, and nothing encoded.
func (d *Decoder) Reset() {
	d.clear()
	if d.source != nil {
		d.source.Destroy()
	}
	release(d.encoded)
	d.source, d.sourceMask = nil, nil
}

// Prefill begins sequences with their prompts. Shorter prompts are padded on the left where the contract says so: the
// mask hides the padding, and positions do not count it.
func (d *Decoder) Prefill(ctx context.Context, prompts [][]int64) (Logits, error) {
	padded, padding := prompts, make([]int64, len(prompts))
	if d.contract.Pads && len(prompts) > 0 {
		longest := len(slices.MaxFunc(prompts, func(a, b []int64) int { return len(a) - len(b) }))
		padded = make([][]int64, len(prompts))
		for row, prompt := range prompts {
			if len(prompt) == 0 {
				return nil, errors.New("prompts: every sequence begins with at least one token")
			}
			padding[row] = int64(longest - len(prompt))
			padded[row] = append(make([]int64, padding[row], longest), prompt...)
		}
	}
	tokens, err := d.ids(padded)
	if err != nil {
		return nil, fmt.Errorf("prompts: %w", err)
	}
	if err := d.mayBegin(int64(len(prompts)), tokens.shape[1]); err != nil {
		return nil, err
	}
	mask := d.sourceMask
	d.clear()
	d.padding, d.history, d.mask = padding, make([][]int64, len(prompts)), mask
	logits, err := d.advanceAll(ctx, tokens)
	if err != nil {
		d.clear()
		return nil, err
	}
	for row := range d.history {
		d.history[row] = d.history[row][padding[row]:]
	}
	return logits, nil
}

func (d *Decoder) mayBegin(batch, count int64) error {
	if most := d.contract.Batch; most != 0 && batch != most {
		return fmt.Errorf("%d prompts: the graph takes %d sequences", batch, most)
	}
	if given := d.contract.Source; given != nil {
		if d.source == nil {
			return errors.New("call Encode before Prefill")
		}
		axis := slices.Index(given.Dims, Dim{Axis: "batch"})
		if axis >= 0 && d.source.GetShape()[axis] != batch {
			return fmt.Errorf("%d prompts for %d sources", batch, d.source.GetShape()[axis])
		}
	}
	return d.hasRoom(count)
}

func (d *Decoder) hasRoom(total int64) error {
	if most := d.MostTokens(); most != 0 && total > most {
		return fmt.Errorf("a sequence has at most %d tokens here, not %d", most, total)
	}
	return nil
}

// Step continues each sequence with its new tokens, as many for each.
func (d *Decoder) Step(ctx context.Context, tokens [][]int64) (Logits, error) {
	if d.length == 0 {
		return nil, errors.New("call Prefill before Step")
	}
	if len(tokens) != len(d.history) {
		return nil, fmt.Errorf("tokens of %d sequences for a cache of %d", len(tokens), len(d.history))
	}
	added, err := d.ids(tokens)
	if err != nil {
		return nil, fmt.Errorf("tokens: %w", err)
	}
	if !d.contract.Chunks && added.shape[1] != 1 {
		return nil, errors.New("with this model a step takes one token of each sequence")
	}
	if err := d.hasRoom(d.length + added.shape[1]); err != nil {
		return nil, err
	}
	return d.advanceAll(ctx, added)
}

// ids makes a table of token ids.
func (d *Decoder) ids(rows [][]int64) (table, error) {
	for _, row := range rows {
		for _, id := range row {
			if most := d.contract.Vocabulary; id < 0 || most != 0 && id >= most {
				return table{}, fmt.Errorf("%d is no token id: the vocabulary has %d entries", id, most)
			}
			if slices.Contains(d.contract.Placeholders, id) {
				return table{}, fmt.Errorf("token %d stands for an image or audio, which this program does not take", id)
			}
		}
	}
	return rectangle(rows)
}

// advanceAll feeds tokens in as many calls as the graph needs; the logits are those of all of them.
func (d *Decoder) advanceAll(ctx context.Context, tokens table) (Logits, error) {
	if !d.contract.OneToken || tokens.shape[1] == 1 {
		return d.advance(ctx, tokens)
	}
	all := make(Logits, tokens.shape[0])
	for position := range tokens.shape[1] {
		logits, err := d.advance(ctx, tokens.column(position))
		if err != nil {
			return nil, err
		}
		for row := range all {
			all[row] = append(all[row], logits[row]...)
		}
	}
	return all, nil
}

// advance runs one call on new tokens and takes what it returns of the cache.
func (d *Decoder) advance(ctx context.Context, tokens table) (Logits, error) {
	call, batch, count := d.contract.Calls.Decode, tokens.shape[0], tokens.shape[1]
	first := d.length == 0
	if first {
		call = d.contract.Calls.Prefill
		if err := d.begin(batch); err != nil {
			return nil, err
		}
	}
	sizes, fed := d.sizes(batch, count), feeds{tokens: &tokens}
	if embed := d.contract.Calls.Embed; embed != nil && call.follows("embeddings") {
		embedded, err := d.call(ctx, embed, sizes, fed)
		if err != nil {
			return nil, err
		}
		defer release(embedded)
		fed.embedded = embedded
	}
	outputs, err := d.call(ctx, call, sizes, fed)
	if err != nil {
		return nil, err
	}
	defer release(outputs)
	next, err := d.next(outputs, first)
	if err != nil {
		return nil, err
	}
	for past, value := range next {
		d.replace(past, value)
	}
	d.length += count
	for row := range d.history {
		d.history[row] = append(d.history[row], tokens.data[int64(row)*count:int64(row+1)*count]...)
	}
	return d.logits(outputs[call.Logits], batch), nil
}

var loading sync.Mutex

// LoadRuntime loads the library of ONNX Runtime, once for the whole program; it does nothing where another package has
// done so. Open calls it. Options of sessions can be made only after it.
func LoadRuntime() error {
	loading.Lock()
	defer loading.Unlock()
	if ort.IsInitialized() {
		return nil
	}
	library := os.Getenv("ONNXRUNTIME_LIB")
	if library == "" {
		library = map[string]string{"darwin": "libonnxruntime.dylib", "windows": "onnxruntime.dll"}[runtime.GOOS]
	}
	if library == "" {
		library = "libonnxruntime.so"
	}
	ort.SetSharedLibraryPath(library)
	if err := ort.InitializeEnvironment(); err != nil {
		return fmt.Errorf("load ONNX Runtime 1.24 or newer; ONNXRUNTIME_LIB is the path of its library: %w", err)
	}
	return nil
}
