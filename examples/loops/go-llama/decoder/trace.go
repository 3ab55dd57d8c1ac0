package decoder

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"math"
	"os"
	"strings"

	ort "github.com/yalue/onnxruntime_go"
)

// mostElements is the largest size of a tensor of which a trace has all elements; of larger ones it has so many.
const mostElements = 64

// callLine is a call in a trace for `kvdoctor step-test MODEL --trace FILE`.
type callLine struct {
	Run   string                    `json:"run,omitempty"`
	File  string                    `json:"file"`
	Fed   map[string]map[string]any `json:"fed"`
	Got   map[string]map[string]any `json:"got,omitempty"`
	Error *string                   `json:"error"`
}

// TraceTo adds each later call to a file, as the variable KVDOCTOR_TRACE does: shapes, the elements of small tensors,
// and samples of larger ones. Lines begin with the name of the run; it may be empty. Without a file nothing is written.
func (d *Decoder) TraceTo(file, run string) { d.trace, d.traceRun = file, run }

func (d *Decoder) note(file string, call *call, failure error) error {
	line := callLine{Run: d.traceRun, File: file, Fed: described(call.fed)}
	if failure != nil {
		message := failure.Error()
		line.Error = &message
	} else {
		line.Got = described(call.got)
	}
	return AppendLine(d.trace, line)
}

// AppendLine adds a value to a file as a line of JSON.
func AppendLine(file string, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	lines, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = lines.Write(append(text, '\n'))
	return errors.Join(err, lines.Close())
}

func described(values map[string]ort.Value) map[string]map[string]any {
	all := map[string]map[string]any{}
	for name, value := range values {
		dtype := ort.TensorElementDataType(value.DataType()).String()
		entry := map[string]any{
			"dtype": strings.ToLower(strings.TrimPrefix(dtype, "ONNX_TENSOR_ELEMENT_DATA_TYPE_")),
			"shape": append([]int64{}, value.GetShape()...),
		}
		field, count, size := "data", product(value.GetShape()), product(value.GetShape())
		if size > mostElements {
			field, count = "sample", mostElements
		}
		elements := make([]any, count)
		for i := range elements {
			at := int64(i)
			if size > mostElements {
				at = at * (size - 1) / (mostElements - 1)
			}
			elements[i] = element(value, at)
		}
		entry[field] = elements
		all[name] = entry
	}
	return all
}

// element is one element of a tensor as JSON can hold it.
func element(value ort.Value, at int64) any {
	switch tensor := value.(type) {
	case *ort.Tensor[float32]:
		return finite(tensor.GetData()[at])
	case *ort.Tensor[int64]:
		return tensor.GetData()[at]
	case *ort.CustomDataTensor: // joined by the loop, or of a type that Go does not have
		data := tensor.GetData()
		switch ort.TensorElementDataType(tensor.DataType()) {
		case ort.TensorElementDataTypeFloat:
			return finite(math.Float32frombits(binary.NativeEndian.Uint32(data[4*at:])))
		}
	}
	return nil
}

// finite is nil for NaN and infinity, which JSON does not have.
func finite(number float32) any {
	if math.IsNaN(float64(number)) || math.IsInf(float64(number), 0) {
		return nil
	}
	return number
}
