package decodeloop

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	ort "github.com/yalue/onnxruntime_go"
)

const contractSchema = "kvdoctor/loop/2"

// Contract is what contract.json says of a model: its calls, what each is fed, and what becomes of the cache.
type Contract struct {
	Schema, Model, Layout string
	Files                 []File
	Calls                 struct {
		Encode, Embed   *Call // nil where the model has none
		Prefill, Decode Call
	}
	Slots            []Slot
	Placeholders     []int64 // tokens in whose places an image or sound belongs
	Source           *Input  // what Encode takes; nil where there is nothing to encode
	SourceAxis       int     `json:"source_axis"` // counts its tokens or frames
	Vocabulary       int64   // entries of a row of logits; 0 where nothing says
	ContextLimit     int64   `json:"context_limit"` // the most tokens of a sequence; 0 where nothing says
	OneToken         bool    `json:"one_token"`     // every call takes one new token
	Batch            int64   // the number of sequences where the graph takes one only, else 0
	CapacityIsChosen bool    `json:"capacity_is_chosen"`
	Pads             bool    // prompts of unequal length are padded on the left
	Chunks           bool    // a step may take several new tokens
	Rewinds          bool
	Reorders         bool
	Generation       struct {
		Start, End    []int64
		Padding       *int64
		Suppress      []int64
		BeginSuppress []int64    `json:"begin_suppress"`
		Forced        [][2]int64 // position, counted from the first token of the prompt, and id
	}
}

// File is one file of the model, with the inputs and outputs that its calls use.
type File struct {
	File   string
	Inputs map[string]struct {
		DType string
		Dims  []Dim
	}
	Outputs []string
}

// Call is one kind of call. Logits is the name of an output, empty where it returns none.
type Call struct {
	File       string
	Inputs     []Input // without the cache
	Pasts      []string
	Outputs    []string
	Logits     string
	LogitsType string `json:"logits_type"`
	LogitsDims []Dim  `json:"logits_dims"`
	Fills      []Fill
	Encoder    *struct { // the axis that counts encoder states, of a value of the encoder or the cache, or of the source
		Name string
		Axis int
	}
}

// Fill is an output of a call that goes into a slot of the cache.
type Fill struct {
	Slot          int
	Output, Carry string
}

// Input is an input that is not of the cache, and the rule by which its value is made.
type Input struct {
	Name, DType          string
	Dims                 []Dim
	Rule, Count          string
	Value, Shown, Hidden float64
	FromRight            bool    `json:"from_right"`
	RowsFrom             *string `json:"rows_from"`
	BatchAxis            *int    `json:"batch_axis"`
	Made                 string  // the output of the embed call or of the encoder that it takes
}

// Slot is one tensor of the cache. Zeros is the shape of its first value, where the loop makes it.
type Slot struct {
	Past, DType string
	Dims        []Dim
	BatchAxis   *int `json:"batch_axis"`
	LengthAxis  *int `json:"length_axis"`
	Rewinds     string
	Heads       int64
	Zeros       []Dim
}

// Dim is the size of an axis: a number, or the name of what it counts.
type Dim struct {
	Size int64
	Axis string
}

// UnmarshalJSON reads a number or a name.
func (d *Dim) UnmarshalJSON(text []byte) error {
	if text[0] == '"' {
		return json.Unmarshal(text, &d.Axis)
	}
	return json.Unmarshal(text, &d.Size)
}

// ReadContract reads a contract.json.
func ReadContract(path string) (*Contract, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	contract, err := ParseContract(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return contract, nil
}

// ParseContract reads the text of a contract.json, which a program may embed. What it asks for and this package does
// not know is an error.
func ParseContract(text []byte) (*Contract, error) {
	var c Contract
	if err := json.Unmarshal(text, &c); err != nil {
		return nil, err
	}
	if c.Schema != contractSchema {
		return nil, fmt.Errorf("its schema is %q, and this program reads %q", c.Schema, contractSchema)
	}
	for _, call := range c.calls() {
		for _, one := range call.Inputs {
			if !slices.Contains(rules, one.Rule) || !slices.Contains(counts, one.Count) || !isMade(one.DType, one.Dims) {
				return nil, fmt.Errorf("this program cannot make input %q: rule %q, count %q, %s with %d axes",
					one.Name, one.Rule, one.Count, one.DType, len(one.Dims))
			}
		}
		for _, fill := range call.Fills {
			if fill.Slot < 0 || fill.Slot >= len(c.Slots) {
				return nil, fmt.Errorf("output %q goes into no slot of the cache", fill.Output)
			}
			slot := c.Slots[fill.Slot]
			if !slices.Contains(carries, fill.Carry) || !isMade(slot.DType, slot.Dims) {
				return nil, fmt.Errorf("this program cannot carry on cache %q: %q, %s with %d axes",
					slot.Past, fill.Carry, slot.DType, len(slot.Dims))
			}
		}
	}
	return &c, nil
}

var (
	rules = []string{
		"tokens", "embeddings", "attention-mask", "causal-mask", "positions", "number", "encoder-input", "encoder-mask",
		"encoder-states", "padding-mask", "window-mask", "rows", "token-and-position",
	}
	counts  = []string{"constant", "past", "total", "last", "new", "last-new", "batch", "encoder_input"}
	carries = []string{"feed-back", "append", "shift", "drop-oldest", "write"}
)

// isMade reports whether the binding makes tensors of a type and shape: those of 16 bits need an axis.
func isMade(dtype string, dims []Dim) bool {
	kind, known := elements[dtype]
	return known && (len(dims) > 0 || !kind.isHalf())
}

// calls are those that the model has.
func (c *Contract) calls() []*Call {
	all := []*Call{&c.Calls.Decode, &c.Calls.Prefill, c.Calls.Encode, c.Calls.Embed}
	return slices.DeleteFunc(all, func(call *Call) bool { return call == nil })
}

// inputs are those of all calls.
func (c *Contract) inputs() (all []Input) {
	for _, call := range c.calls() {
		all = append(all, call.Inputs...)
	}
	return all
}

// compare fails where the files are not those of the contract. The binding has the inputs and outputs of a file from a
// session that it opens for this alone.
func (c *Contract) compare(folder string) error {
	options, err := ort.NewSessionOptions()
	if err != nil {
		return err
	}
	defer options.Destroy()
	if err := options.SetGraphOptimizationLevel(ort.GraphOptimizationLevelDisableAll); err != nil {
		return err
	}
	for _, file := range c.Files {
		path := filepath.Join(folder, file.File)
		inputs, outputs, err := ort.GetInputOutputInfoWithOptions(path, options)
		if err != nil {
			return fmt.Errorf("open %q: %w", path, err)
		}
		if err := file.compare(inputs, outputs); err != nil {
			return fmt.Errorf("contract.json is of another model than %q: %w", path, err)
		}
	}
	return nil
}

func (f *File) compare(inputs, outputs []ort.InputOutputInfo) error {
	for _, found := range inputs {
		given, ok := f.Inputs[found.Name]
		if !ok {
			return fmt.Errorf("the file has an input %q, which the contract does not feed", found.Name)
		}
		same := found.DataType == elements[given.DType].code
		same = same && (len(found.Dimensions) == 0 || len(found.Dimensions) == len(given.Dims))
		for axis, size := range found.Dimensions {
			same = same && (size <= 0 || given.Dims[axis] == Dim{Size: size})
		}
		if !same {
			return fmt.Errorf("input %q is %s%v, not %s%v", found.Name, found.DataType, found.Dimensions, given.DType, given.Dims)
		}
	}
	has := func(all []ort.InputOutputInfo, name string) bool {
		return slices.ContainsFunc(all, func(one ort.InputOutputInfo) bool { return one.Name == name })
	}
	for name := range f.Inputs {
		if !has(inputs, name) {
			return fmt.Errorf("the file has no input %q", name)
		}
	}
	for _, name := range f.Outputs {
		if !has(outputs, name) {
			return fmt.Errorf("the file has no output %q", name)
		}
	}
	return nil
}
