// Package decoder is the decode loop of llama-gqa
// (layout optimum-decoder-only), written by kvdoctor 0.1.0.
//
//	d, err := decoder.Open("path/to/the/model", nil)
//	tokens, err := d.Generate([][]int64{{5, 6, 7}}, decoder.Options{Most: 20})
//
// All names, types and sizes are those of the cache contract of this model; README.md says it in words.
package decoder

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"unsafe"

	ort "github.com/yalue/onnxruntime_go"
)

const (
	decoderFile = "model.onnx"
)

var decoderInputs = []string{
	"input_ids",
	"attention_mask",
	"position_ids",
	"past_key_values.0.key",
	"past_key_values.0.value",
	"past_key_values.1.key",
	"past_key_values.1.value",
}

var decoderOutputs = []string{
	"logits",
	"present.0.key",
	"present.0.value",
	"present.1.key",
	"present.1.value",
}

// contextLimit is the most tokens of a sequence that the model reads.
const contextLimit = 64

// Sizes of the cache that are known only when the loop runs.
const (
	axisBatch int64 = -1 - iota
	axisPast
)

// slot is one tensor of the cache.
type slot struct {
	past    string // the input that it is fed to
	made    string // the output that first fills it, of the first call
	present string // the output of a later call that carries it on; empty where the first value is kept
	dtype   ort.TensorElementDataType
	shape   []int64

	lengthAxis int // the axis of the tokens; -1 where there is none

	batchAxis int // the axis of the sequences; -1 where there is none
}

var cache = []slot{
	{past: "past_key_values.0.key", made: "present.0.key", present: "present.0.key", dtype: ort.TensorElementDataTypeFloat, shape: []int64{axisBatch, 2, axisPast, 8}, lengthAxis: 2, batchAxis: 0},
	{past: "past_key_values.0.value", made: "present.0.value", present: "present.0.value", dtype: ort.TensorElementDataTypeFloat, shape: []int64{axisBatch, 2, axisPast, 8}, lengthAxis: 2, batchAxis: 0},
	{past: "past_key_values.1.key", made: "present.1.key", present: "present.1.key", dtype: ort.TensorElementDataTypeFloat, shape: []int64{axisBatch, 2, axisPast, 8}, lengthAxis: 2, batchAxis: 0},
	{past: "past_key_values.1.value", made: "present.1.value", present: "present.1.value", dtype: ort.TensorElementDataTypeFloat, shape: []int64{axisBatch, 2, axisPast, 8}, lengthAxis: 2, batchAxis: 0},
}

// Decoder holds the model, and the cache of one batch of sequences. It serves one goroutine at a time.
//
// The binding copies each output into memory of Go once; from then on the cache goes from step to step without a copy
// and without being read. A value is destroyed as soon as the next step has replaced it.
type Decoder struct {
	decoder *graph

	trace, traceRun string // the file that calls are noted in, and what their lines begin with

	length  int64                // tokens in the cache, padding counted
	padding []int64              // of each sequence, on the left
	cache   map[string]ort.Value // by the names of the pasts
}

// Open opens the files in folder. Without options the sessions run on the CPU.
func Open(folder string, options *ort.SessionOptions) (*Decoder, error) {
	if err := LoadRuntime(); err != nil {
		return nil, err
	}
	d := &Decoder{trace: os.Getenv("KVDOCTOR_TRACE"), cache: map[string]ort.Value{}}
	var err error
	if d.decoder, err = open(folder, decoderFile, decoderInputs, decoderOutputs, options); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// Close releases the cache and the sessions.
func (d *Decoder) Close() {
	d.Reset()
	for _, graph := range []*graph{d.decoder} {
		if graph != nil {
			graph.session.Destroy()
		}
	}
}

// Length is the number of tokens in the cache, padding counted.
func (d *Decoder) Length() int64 { return d.length }

// MostTokens is the most tokens that a sequence may have.
func (d *Decoder) MostTokens() int64 { return contextLimit }

// Reset begins anew: no sequences.
func (d *Decoder) Reset() {
	d.clear(nil)
}

func (d *Decoder) clear(padding []int64) {
	for name := range d.cache {
		d.replace(name, nil)
	}
	clear(d.cache)
	d.length, d.padding = 0, padding
}

// replace gives the cache another value and destroys the one before.
func (d *Decoder) replace(name string, value ort.Value) {
	before := d.cache[name]
	d.cache[name] = value
	if before != nil {
		before.Destroy()
	}
}

// Prefill begins sequences with their prompts; it returns the last logits of each.
// Shorter prompts are padded on the left: the mask hides the padding, and positions do not count it.
func (d *Decoder) Prefill(prompts [][]int64) ([][]float32, error) {
	longest := 0
	for _, prompt := range prompts {
		if len(prompt) == 0 {
			return nil, errors.New("every sequence begins with at least one token")
		}
		longest = max(longest, len(prompt))
	}
	padding := make([]int64, len(prompts))
	padded := make([][]int64, len(prompts))
	for row, prompt := range prompts {
		missing := longest - len(prompt)
		padding[row] = int64(missing)
		padded[row] = append(make([]int64, missing, longest), prompt...)
	}
	tokens, err := ids(padded)
	if err != nil {
		return nil, fmt.Errorf("prompts: %w", err)
	}
	d.clear(padding)
	return d.advance(tokens)
}

// Step continues each sequence with its new tokens; it returns logits as Prefill does.
func (d *Decoder) Step(tokens [][]int64) ([][]float32, error) {
	if d.length == 0 {
		return nil, errors.New("call Prefill before Step")
	}
	if len(tokens) != len(d.padding) {
		return nil, fmt.Errorf("tokens of %d sequences for a cache of %d", len(tokens), len(d.padding))
	}
	added, err := ids(tokens)
	if err != nil {
		return nil, fmt.Errorf("tokens: %w", err)
	}
	return d.advance(added)
}

// advance runs one call on new tokens and keeps what it returns of the cache.
func (d *Decoder) advance(tokens array[int64]) ([][]float32, error) {
	batch, count := tokens.shape[0], tokens.shape[1]
	if most := d.MostTokens(); d.length+count > most {
		return nil, fmt.Errorf("a sequence has at most %d tokens here", most)
	}
	first := d.length == 0
	if first {
		if err := d.begin(batch); err != nil {
			return nil, err
		}
	}
	call := newCall()
	defer call.end()
	d.feed(call, tokens)
	if err := d.run(d.decoder, call); err != nil {
		return nil, err
	}
	for _, slot := range cache {
		name := slot.present
		if first {
			name = slot.made
		}
		value, ok := call.got[name]
		if !ok {
			continue
		}
		delete(call.got, name) // the cache owns it from here
		d.replace(slot.past, value)
	}
	d.length += count
	return lastLogits(call.got["logits"], batch), nil
}

func (d *Decoder) feed(call *call, tokens array[int64]) {
	batch := tokens.shape[0]
	count := tokens.shape[1]
	past := d.length
	total := d.length + tokens.shape[1]
	put(call, "input_ids", tokens)
	put(call, "attention_mask", mask([]int64{batch, total}, total, d.padding, int64(1), int64(0)))
	put(call, "position_ids", positions([]int64{batch, count}, past, d.padding))
	for name, value := range d.cache {
		call.lend(name, value)
	}
}

// begin gives the cache what the first call is fed: zeros.
func (d *Decoder) begin(batch int64) error {
	sizes := map[int64]int64{axisBatch: batch, axisPast: 0}
	for _, slot := range cache {
		value, err := zeros(slot.dtype, resolve(slot.shape, sizes))
		if err != nil {
			return fmt.Errorf("%s: %w", slot.past, err)
		}
		d.replace(slot.past, value)
	}
	return nil
}

// Rewind forgets the last tokens of every sequence. At least one token must stay.
func (d *Decoder) Rewind(count int64) error {
	shortest := d.length
	if len(d.padding) > 0 {
		shortest -= slices.Max(d.padding)
	}
	if count < 0 || count >= shortest {
		return fmt.Errorf("cannot forget %d of %d tokens", count, shortest)
	}
	d.length -= count
	for _, slot := range cache {
		if slices.Contains(slot.shape, axisPast) {
			kept, err := join(slot.lengthAxis, part{d.cache[slot.past], 0, d.length})
			if err != nil {
				return err
			}
			d.replace(slot.past, kept)
		}
	}
	return nil
}

// Reorder makes row i of the batch a copy of what row rows[i] was, as a beam search needs it.
func (d *Decoder) Reorder(rows []int64) error {
	if d.length == 0 || len(rows) == 0 {
		return errors.New("there are no sequences to change, or none would be left")
	}
	for _, row := range rows {
		if row < 0 || row >= int64(len(d.padding)) {
			return fmt.Errorf("there is no row %d among %d sequences", row, len(d.padding))
		}
	}
	for _, slot := range cache {
		if slot.batchAxis < 0 {
			continue
		}
		chosen, err := choose(d.cache[slot.past], slot.batchAxis, rows)
		if err != nil {
			return err
		}
		d.replace(slot.past, chosen)
	}
	padding := make([]int64, len(rows))
	for i, row := range rows {
		padding[i] = d.padding[row]
	}
	d.padding = padding
	return nil
}

// choose copies rows of a tensor along the axis of the sequences.
func choose(value ort.Value, axis int, rows []int64) (ort.Value, error) {
	parts := make([]part, len(rows))
	for i, row := range rows {
		parts[i] = part{value, row, row + 1}
	}
	return join(axis, parts...)
}

// Options say how Generate decodes.
type Options struct {
	Most    int                          // the most new tokens; 0 for 20
	Stop    []int64                      // tokens that end a sequence
	Choose  func(logits []float32) int64 // picks a token; nil takes the likeliest
	OnToken func(row int, token int64)   // is called for each new token; may be nil
}

// Generate decodes until every sequence has ended; it returns the new tokens of each, the stop token not among them.
func (d *Decoder) Generate(prompts [][]int64, options Options) ([][]int64, error) {
	choose, most := options.Choose, options.Most
	if choose == nil {
		choose = Likeliest
	}
	if most == 0 {
		most = 20
	}
	if most < 0 {
		return nil, errors.New("the most new tokens are at least 1")
	}
	made, ended := make([][]int64, len(prompts)), make([]bool, len(prompts))
	logits, err := d.Prefill(prompts)
	if err != nil {
		return nil, err
	}
	for {
		chosen, going, longest := make([][]int64, len(prompts)), false, 0
		for row := range prompts {
			token := choose(logits[row])
			chosen[row] = []int64{token}
			ended[row] = ended[row] || slices.Contains(options.Stop, token)
			if !ended[row] {
				going = true
				made[row] = append(made[row], token)
				if options.OnToken != nil {
					options.OnToken(row, token)
				}
			}
			longest = max(longest, len(made[row]))
		}
		if !going || longest >= most || d.length >= d.MostTokens() {
			return made, nil
		}
		if logits, err = d.Step(chosen); err != nil {
			return nil, err
		}
	}
}

// Likeliest is the token with the largest of the logits.
func Likeliest(logits []float32) int64 {
	best := 0
	for i, logit := range logits {
		if logit > logits[best] {
			best = i
		}
	}
	return int64(best)
}

// lastLogits copies the last row of each sequence.
func lastLogits(value ort.Value, batch int64) [][]float32 {
	shape := value.GetShape()
	rows, each := make([][]float32, batch), product(shape)/batch
	width := each
	if len(shape) == 3 { // a row for each new token
		width /= shape[1]
	}
	for row := range rows {
		end := int64(row+1) * each
		rows[row] = slices.Clone(value.(*ort.Tensor[float32]).GetData()[end-width : end])
	}
	return rows
}

// graph is one file of the model.
type graph struct {
	file            string
	inputs, outputs []string
	session         *ort.DynamicAdvancedSession
}

func open(folder, file string, inputs, outputs []string, options *ort.SessionOptions) (*graph, error) {
	path := filepath.Join(folder, file)
	session, err := ort.NewDynamicAdvancedSession(path, inputs, outputs, options)
	if err != nil {
		return nil, fmt.Errorf("open %q: %w", path, err)
	}
	return &graph{file, inputs, outputs, session}, nil
}

// LoadRuntime loads the library of ONNX Runtime, once for the whole program. Open does so as well; options of sessions can
// be made only after it.
func LoadRuntime() error {
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

// call is one run of a graph.
type call struct {
	fed  map[string]ort.Value // inputs
	made []ort.Value          // those of them that belong to this call; the others are lent
	got  map[string]ort.Value // outputs; before the run, those with room made for them
	err  error                // of the functions that add to the call
}

func newCall() *call {
	return &call{fed: map[string]ort.Value{}, got: map[string]ort.Value{}}
}

// end destroys the inputs that were made for the call, and the outputs that nobody took.
func (c *call) end() {
	for _, value := range c.made {
		value.Destroy()
	}
	release(c.got)
}

func (c *call) lend(name string, value ort.Value) { c.fed[name] = value }

func (c *call) own(name string, value ort.Value, err error) {
	if err != nil {
		c.err = errors.Join(c.err, fmt.Errorf("input %q: %w", name, err))
		return
	}
	c.fed[name] = value
	c.made = append(c.made, value)
}

func put[T ort.TensorData](c *call, name string, given array[T]) {
	value, err := ort.NewTensor(given.shape, given.data)
	c.own(name, value, err)
}

// run runs a graph. The inputs must not be destroyed before it returns.
func (d *Decoder) run(graph *graph, call *call) error {
	if call.err != nil {
		return call.err
	}
	err := graph.run(call)
	if d.trace != "" {
		err = errors.Join(err, d.note(graph.file, call, err))
	}
	if err != nil {
		return fmt.Errorf("run %q: %w", graph.file, err)
	}
	return nil
}

func (g *graph) run(call *call) error {
	inputs, outputs := make([]ort.Value, len(g.inputs)), make([]ort.Value, len(g.outputs))
	for i, name := range g.inputs {
		inputs[i] = call.fed[name]
	}
	for i, name := range g.outputs {
		outputs[i] = call.got[name] // nil: allocated by the binding
	}
	if err := g.session.Run(inputs, outputs); err != nil {
		return err
	}
	for i, name := range g.outputs {
		call.got[name] = outputs[i]
	}
	return nil
}

func release(values map[string]ort.Value) {
	for _, value := range values {
		value.Destroy()
	}
	clear(values)
}

// zeros makes a tensor of zeros; it may have no elements.
func zeros(dtype ort.TensorElementDataType, shape []int64) (ort.Value, error) {
	switch dtype {
	case ort.TensorElementDataTypeFloat:
		return ort.NewEmptyTensor[float32](shape)
	}
	return nil, fmt.Errorf("no loop was written for a tensor of %s", dtype)
}

// resolve fills in the sizes that are known now.
func resolve(shape []int64, sizes map[int64]int64) []int64 {
	known := slices.Clone(shape)
	for i, size := range known {
		if size < 0 {
			known[i] = sizes[size]
		}
	}
	return known
}

// part is a range of the rows of a tensor along some axis.
type part struct {
	value    ort.Value
	from, to int64
}

// width is the size of an element in bytes.
func width(dtype ort.TensorElementDataType) int64 {
	switch dtype {
	case ort.TensorElementDataTypeFloat:
		return 4
	case ort.TensorElementDataTypeInt64:
		return 8
	default:
		return 1
	}
}

// join makes a tensor of parts along an axis. It copies bytes, whatever the elements are.
func join(axis int, parts ...part) (ort.Value, error) {
	dtype := ort.TensorElementDataType(parts[0].value.DataType())
	shape := parts[0].value.GetShape()
	blocks, row := product(shape[:axis]), product(shape[axis+1:])*width(dtype)
	lengths := make([]int64, len(parts))
	shape[axis] = 0
	for i, part := range parts {
		lengths[i] = part.value.GetShape()[axis]
		shape[axis] += part.to - part.from
	}
	joined := make([]byte, 0, max(1, product(shape)*width(dtype)))
	for block := range blocks {
		for i, part := range parts {
			start := block * lengths[i]
			joined = append(joined, contents(part.value)[(start+part.from)*row:(start+part.to)*row]...)
		}
	}
	return ort.NewCustomDataTensor(shape, joined[:max(1, len(joined))], dtype)
}

// contents gives the bytes of a tensor, which remain the tensor's.
func contents(value ort.Value) []byte {
	switch tensor := value.(type) {
	case *ort.CustomDataTensor:
		return tensor.GetData()
	case *ort.Tensor[float32]:
		return bytesOf(tensor.GetData())
	}
	panic(fmt.Sprintf("no loop was written for a cache of %T", value))
}

func bytesOf[T ort.TensorData](data []T) []byte {
	var element T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(data))), len(data)*int(unsafe.Sizeof(element)))
}

// array is a tensor that the loop makes, before the binding has it.
type array[T any] struct {
	shape []int64
	data  []T
}

// table makes an array of rows, which must have the same length.
func table(rows [][]int64) (array[int64], error) {
	if len(rows) == 0 || len(rows[0]) == 0 {
		return array[int64]{}, errors.New("there is nothing in it")
	}
	made := array[int64]{shape: []int64{int64(len(rows)), int64(len(rows[0]))}}
	for _, row := range rows {
		if len(row) != len(rows[0]) {
			return array[int64]{}, fmt.Errorf("the rows have %d and %d numbers, but must have the same length", len(rows[0]), len(row))
		}
		made.data = append(made.data, row...)
	}
	return made, nil
}

// ids makes an array of token ids, which must be some for each sequence, and as many.
func ids(rows [][]int64) (array[int64], error) {
	for _, row := range rows {
		for _, id := range row {
			if id < 0 || id >= 128 {
				return array[int64]{}, fmt.Errorf("token ids are 0 to 127; got %d", id)
			}
		}
	}
	return table(rows)
}

func full[T any](shape []int64, value T) array[T] {
	made := array[T]{shape, make([]T, product(shape))}
	for i := range made.data {
		made.data[i] = value
	}
	return made
}

// mask shows the tokens and hides padding on the left, and what lies behind the last token. Columns are the cache.
func mask[T any](shape []int64, total int64, padding []int64, shown, hidden T) array[T] {
	made, columns := full(shape, hidden), shape[len(shape)-1]
	for i := range made.data {
		column := int64(i) % columns
		if column < total && (padding == nil || column >= padding[int64(i)/columns]) {
			made.data[i] = shown
		}
	}
	return made
}

// positions are those of the new tokens; padding on the left is not counted.
func positions(shape []int64, past int64, padding []int64) array[int64] {
	made, columns := full(shape, int64(0)), shape[len(shape)-1]
	for i := range made.data {
		made.data[i] = past + int64(i)%columns
		if padding != nil {
			made.data[i] = max(made.data[i]-padding[int64(i)/columns%int64(len(padding))], 0)
		}
	}
	return made
}

func product(sizes []int64) int64 {
	all := int64(1)
	for _, size := range sizes {
		all *= size
	}
	return all
}
