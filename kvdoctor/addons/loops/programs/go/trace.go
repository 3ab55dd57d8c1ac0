package decodeloop

import (
	"encoding/json"
	"io"
	"math"

	ort "github.com/yalue/onnxruntime_go"
)

// mostElements is the largest size of a tensor of which a trace has all elements; of larger ones it has so many.
const mostElements = 64

// Trace writes each later call as a line of JSON for `kvdoctor step-test MODEL --trace FILE`: shapes, the elements of
// small tensors, samples of larger ones. The lines have the name of the run, which may be empty. Without a writer nothing
// is written.
func (d *Decoder) Trace(to io.Writer, run string) { d.trace, d.run = to, run }

func (d *Decoder) note(file string, fed, got map[string]ort.Value, failure error) error {
	line := map[string]any{"file": file, "fed": described(fed), "error": nil}
	if d.run != "" {
		line["run"] = d.run
	}
	if failure != nil {
		line["error"] = failure.Error()
	} else {
		line["got"] = described(got)
	}
	return json.NewEncoder(d.trace).Encode(line)
}

func described(values map[string]ort.Value) map[string]any {
	all := map[string]any{}
	for name, value := range values {
		dtype, kind := kindOf(value)
		shape := append([]int64{}, value.GetShape()...)
		bytes, size, part := kind.bytes(value), product(shape), "data"
		chosen := make([]any, min(size, mostElements))
		if size > mostElements {
			part = "sample"
		}
		for i := range chosen {
			at := int64(i)
			if size > mostElements {
				at = at * (size - 1) / (mostElements - 1)
			}
			// JSON has no NaN and no infinity.
			if number := kind.read(&bytes[at*kind.width]); !math.IsNaN(number) && !math.IsInf(number, 0) {
				chosen[i] = number
			}
		}
		all[name] = map[string]any{"dtype": dtype, "shape": shape, part: chosen}
	}
	return all
}
