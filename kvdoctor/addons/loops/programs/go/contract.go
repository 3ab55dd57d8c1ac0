package decodeloop

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	ort "github.com/yalue/onnxruntime_go"
)

const contractSchema = "kvdoctor/loop/4"

// Contract is what contract.json says of a model: its calls, what each is fed, and what becomes of the cache.
type Contract struct {
	Schema, Model, Layout string
	Files                 []File
	Calls                 struct{ Encode, Prefill, Decode []Call } // of each phase, in order
	Zeros                 []struct {                               // the values before the first call
		Value, DType string
		Dims         []Dim
	}
	Cut, Rows        []Axis // what a rewind cuts, and what a reorder changes
	Heads            int64
	Source           *Source // what Encode takes; nil where there is nothing to encode
	Placeholders     []int64 // tokens in whose places an image or sound belongs
	Vocabulary       int64   // token ids are smaller
	ContextLimit     int64   `json:"context_limit"` // the most tokens of the cache
	Longest          int64   // the most tokens of a sequence: those that do not fit are written over the oldest
	OneToken         bool    `json:"one_token"` // every call takes one new token
	Batch            int64   // the number of sequences where the graph takes one only, else 0
	CapacityIsChosen bool    `json:"capacity_is_chosen"`
	Pads             bool    // prompts of unequal length are padded on the left
	Chunks           bool    // a step may take several new tokens
	Rewinds          bool
	Reorders         bool
	Generation       struct {
		Start, End    []int64
		Suppress      []int64
		BeginSuppress []int64    `json:"begin_suppress"`
		Forced        [][2]int64 // position, counted from the first token of the prompt, and id
	}
}

// File is one file of the model, with the inputs and outputs that its calls use; -1 is any size.
type File struct {
	File   string
	Inputs map[string]struct {
		DType string
		Shape []int64
	}
	Outputs []string
}

// Source is what the caller gives before the prompts. It may have a mask where it is Masked.
type Source struct {
	DType      string
	Dims       []Dim
	BatchAxis  *int `json:"batch_axis"`
	LengthAxis int  `json:"length_axis"`
	Masked     bool
}

func (s *Source) isIDs() bool { return s.DType == "int64" || s.DType == "int32" }

// Call is a call of a file. Logits is the name of an output, empty where it returns none.
type Call struct {
	File       string
	Values     map[string]string // the names of the values that inputs are fed
	Made       []Made
	Outputs    []string
	Logits     string
	LogitsType string `json:"logits_type"`
	LogitsDims []Dim  `json:"logits_dims"` // nil where it is not known before a call, as in Take
	Takes      []Take
	Sizes      map[string]Axis // those that only values have
}

// Made is an input that is made for a call, row by row along its last axis. A row has Inside from the column Begin to
// before End, and Step more for each column, else Outside; what Copy names is written over it. The sums are of numbers
// with factors.
type Made struct {
	Name, DType        string
	Dims               []Dim
	BatchAxis          *int `json:"batch_axis"`
	Copy               string
	Begin, End, Inside map[string]float64
	Outside, Step      float64
}

// Take is an output of a call that becomes a value, by a rule along an axis.
type Take struct {
	Output, Value, Carry, DType string
	Axis                        *int
	Dims                        []Dim
}

// Axis is an axis of a value. A sequence has Each entries of it.
type Axis struct {
	Value string
	Axis  int
	Each  int64
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

// ParseContract reads the text of a contract.json, which a program may embed.
func ParseContract(text []byte) (*Contract, error) {
	var c Contract
	if err := json.Unmarshal(text, &c); err != nil {
		return nil, err
	}
	if c.Schema != contractSchema {
		return nil, fmt.Errorf("its schema is %q, and this program reads %q", c.Schema, contractSchema)
	}
	return &c, nil
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
	missing := maps.Clone(f.Inputs)
	for _, found := range inputs {
		due, known := missing[found.Name]
		delete(missing, found.Name)
		fits := slices.EqualFunc(found.Dimensions, due.Shape, func(size, wanted int64) bool {
			return size <= 0 || size == wanted
		})
		if !known || found.DataType != elements[due.DType].code || len(found.Dimensions) > 0 && !fits {
			return fmt.Errorf("its input %q is %s%v, not %s%v", found.Name, found.DataType, found.Dimensions, due.DType, due.Shape)
		}
	}
	names := slices.Collect(maps.Keys(missing))
	for _, name := range f.Outputs {
		if !slices.ContainsFunc(outputs, func(one ort.InputOutputInfo) bool { return one.Name == name }) {
			names = append(names, name)
		}
	}
	if len(names) > 0 {
		return fmt.Errorf("the file has no %q", names)
	}
	return nil
}
