// Package decodeloop decodes with an ONNX decoder that has a KV cache. What the loop does is not in its code: it is read
// from a contract.json, which kvdoctor writes for a model.
//
//	contract, err := decodeloop.ReadContract("contract.json")
//	d, err := decodeloop.Open("path/to/the/model", contract, decodeloop.Options{})
//	defer d.Close()
//	tokens, err := d.Generate(ctx, [][]int64{{5, 6, 7}}, decodeloop.Generation{Most: 20})
package decodeloop

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"

	ort "github.com/yalue/onnxruntime_go"
)

// Options say how a model is opened.
type Options struct {
	Session  *ort.SessionOptions // threads and execution provider; nil is the CPU
	Capacity int64               // room of the cache in tokens, where the contract lets it be chosen; 0 is 512
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
	encoded    map[string]ort.Value
	sourceMask [][]int64

	// The sequences.
	length  int64                // tokens in the cache, padding counted
	padding []int64              // of each sequence, on the left
	history [][]int64            // the tokens of each sequence, without padding
	cache   map[string]ort.Value // by the names of the pasts
	mask    [][]int64            // of the source
}

// Open opens the files of a model in a folder.
func Open(folder string, contract *Contract, options Options) (*Decoder, error) {
	if err := LoadRuntime(); err != nil {
		return nil, err
	}
	capacity := contract.ContextLimit
	if contract.CapacityIsChosen {
		capacity = max(cmp.Or(options.Capacity, 512), 1)
	}
	if err := contract.compare(folder); err != nil {
		return nil, err
	}
	d := &Decoder{
		contract: contract, capacity: capacity, graphs: map[string]*graph{}, reserved: map[*Call][]room{},
		encoded: map[string]ort.Value{}, cache: map[string]ort.Value{},
	}
	for phase, calls := range [][]Call{contract.Calls.Encode, contract.Calls.Prefill, contract.Calls.Decode} {
		for i := range calls {
			err := d.open(folder, &calls[i], options.Session)
			if err == nil {
				d.reserved[&calls[i]], err = d.rooms(&calls[i], phase == 0)
			}
			if err != nil {
				d.Close()
				return nil, err
			}
		}
	}
	return d, nil
}

func (d *Decoder) open(folder string, call *Call, options *ort.SessionOptions) error {
	if d.graphs[call.File] != nil {
		return nil
	}
	inputs := slices.Collect(maps.Keys(call.Values))
	for _, one := range call.Made {
		inputs = append(inputs, one.Name)
	}
	path := filepath.Join(folder, call.File)
	session, err := ort.NewDynamicAdvancedSession(path, inputs, call.Outputs, options)
	if err != nil {
		return fmt.Errorf("open %q: %w", path, err)
	}
	run, err := ort.NewRunOptions()
	d.graphs[call.File] = &graph{inputs, call.Outputs, session, run}
	return err
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

// MostTokens is the most tokens that a sequence may have, padding counted.
func (d *Decoder) MostTokens() int64 {
	if d.contract.CapacityIsChosen {
		return min(d.capacity, d.contract.Longest)
	}
	return d.contract.Longest
}

// Reset begins anew: no sequences, and nothing encoded.
func (d *Decoder) Reset() {
	d.sourceMask = nil
	d.clear()
	release(d.encoded)
}

// Prefill begins sequences with their prompts. Shorter prompts are padded on the left where the contract says so: the
// mask hides the padding, and positions do not count it.
func (d *Decoder) Prefill(ctx context.Context, prompts [][]int64) (Logits, error) {
	if err := d.checkBegin(prompts); err != nil {
		return nil, err
	}
	longest := 0
	for _, prompt := range prompts {
		longest = max(longest, len(prompt))
	}
	padded, padding := slices.Clone(prompts), make([]int64, len(prompts))
	for row, prompt := range prompts {
		if len(prompt) == 0 {
			return nil, errors.New("prompts: every sequence begins with at least one token")
		}
		if d.contract.Pads {
			padding[row] = int64(longest - len(prompt))
			padded[row] = append(make([]int64, padding[row], longest), prompt...)
		}
	}
	if err := d.check(prompts, padded, padding, 0); err != nil {
		return nil, fmt.Errorf("prompts: %w", err)
	}
	d.clear()
	d.padding, d.history = padding, make([][]int64, len(prompts))
	err := d.begin(int64(len(prompts)))
	var logits Logits
	if err == nil {
		logits, err = d.advance(ctx, padded)
	}
	if err != nil {
		d.clear()
		return nil, err
	}
	for row := range d.history {
		d.history[row] = d.history[row][padding[row]:]
	}
	return logits, nil
}

func (d *Decoder) checkBegin(prompts [][]int64) error {
	batch := int64(len(prompts))
	if most := d.contract.Batch; most != 0 && batch != most {
		return fmt.Errorf("%d prompts: the graph takes %d sequences", batch, most)
	}
	given := d.contract.Source
	if given == nil {
		return nil
	}
	if d.encoded[source] == nil {
		return errors.New("call Encode before Prefill")
	}
	if shape := d.encoded[source].GetShape(); given.BatchAxis != nil && shape[*given.BatchAxis] != batch {
		return fmt.Errorf("%d prompts for %d sources", batch, shape[*given.BatchAxis])
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
	if err := d.check(tokens, tokens, d.padding, d.length); err != nil {
		return nil, fmt.Errorf("tokens: %w", err)
	}
	if !d.contract.Chunks && len(tokens[0]) != 1 {
		return nil, errors.New("with this model a step takes one token of each sequence")
	}
	return d.advance(ctx, tokens)
}

// check refuses ids that are no tokens of text, rows of unequal length, and more tokens than there may be.
func (d *Decoder) check(tokens, rows [][]int64, padding []int64, length int64) error {
	for _, id := range slices.Concat(tokens...) {
		if id < 0 || id >= d.contract.Vocabulary {
			return fmt.Errorf("%d is no token id: they are 0 to %d", id, d.contract.Vocabulary-1)
		}
		if slices.Contains(d.contract.Placeholders, id) {
			return fmt.Errorf("token %d stands for an image or audio, which this program does not take", id)
		}
	}
	shape, err := rectangle(rows)
	if err != nil {
		return err
	}
	most := d.MostTokens()
	if slices.ContainsFunc(padding, func(count int64) bool { return count > 0 }) {
		most = min(most, d.contract.ContextLimit) // a ring has no place for it
	}
	if length+shape[1] > most {
		return fmt.Errorf("a sequence has at most %d tokens here, not %d", most, length+shape[1])
	}
	return nil
}

// advance feeds tokens in as many calls as the graph needs; the logits are those of the last one.
func (d *Decoder) advance(ctx context.Context, tokens [][]int64) (logits Logits, err error) {
	count := int64(len(tokens[0]))
	size := count
	if d.contract.OneToken || d.length+count > d.contract.ContextLimit { // in a full ring, each replaces the oldest
		size = 1
	}
	for at := int64(0); at < count; at += size {
		part := make([][]int64, len(tokens))
		for row := range tokens {
			part[row] = tokens[row][at : at+size]
		}
		calls := d.contract.Calls.Decode
		if d.length == 0 {
			calls = d.contract.Calls.Prefill
		}
		if logits, err = d.runCalls(ctx, calls, part); err != nil {
			return nil, err
		}
		d.length += size
		for row := range d.history {
			d.history[row] = append(d.history[row], part[row]...)
		}
	}
	return logits, nil
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
	usual := map[string]string{"darwin": "libonnxruntime.dylib", "windows": "onnxruntime.dll"}[runtime.GOOS]
	ort.SetSharedLibraryPath(cmp.Or(os.Getenv("ONNXRUNTIME_LIB"), usual, "libonnxruntime.so"))
	if err := ort.InitializeEnvironment(); err != nil {
		return fmt.Errorf("load ONNX Runtime 1.24 or newer; ONNXRUNTIME_LIB is the path of its library: %w", err)
	}
	return nil
}
