package decodeloop

import (
	"errors"
	"fmt"
	"math"
	"unsafe"

	"github.com/x448/float16"
	ort "github.com/yalue/onnxruntime_go"
)

// element is an element type: its constant and size in bytes, how one is read and written, how a tensor without axes is
// made, and how the bytes of a tensor are had from the binding's types.
type element struct {
	code   ort.TensorElementDataType
	width  int64
	read   func(*byte) float64
	write  func(*byte, float64)
	scalar func(float64) (ort.Value, error)
	bytes  func(ort.Value) []byte
}

var elements = map[string]element{
	"float":  number[float32](ort.TensorElementDataTypeFloat),
	"double": number[float64](ort.TensorElementDataTypeDouble),
	"int64":  number[int64](ort.TensorElementDataTypeInt64),
	"int32":  number[int32](ort.TensorElementDataTypeInt32),
	"int8":   number[int8](ort.TensorElementDataTypeInt8),
	"uint8":  number[uint8](ort.TensorElementDataTypeUint8),
	"bool":   truthValue(),
	"float16": half(ort.TensorElementDataTypeFloat16,
		func(bits uint16) float32 { return float16.Frombits(bits).Float32() },
		func(number float32) uint16 { return float16.Fromfloat32(number).Bits() }),
	"bfloat16": half(ort.TensorElementDataTypeBFloat16, fromBrain, toBrain),
}

var names = map[ort.TensorElementDataType]string{}

func init() {
	for name, kind := range elements {
		names[kind.code] = name
	}
}

func number[T float32 | float64 | int64 | int32 | int8 | uint8](code ort.TensorElementDataType) element {
	return element{
		code, int64(unsafe.Sizeof(T(0))),
		func(at *byte) float64 { return float64(*(*T)(unsafe.Pointer(at))) },
		func(at *byte, value float64) { *(*T)(unsafe.Pointer(at)) = T(value) },
		func(value float64) (ort.Value, error) { return ort.NewScalar(T(value)) },
		bytesOf[T],
	}
}

func truthValue() element {
	kind := number[uint8](ort.TensorElementDataTypeBool)
	kind.scalar = func(value float64) (ort.Value, error) { return ort.NewScalar(value != 0) }
	kind.bytes = bytesOf[bool]
	return kind
}

// half is a type that Go does not have: the binding reads and makes bytes.
func half(code ort.TensorElementDataType, from func(uint16) float32, to func(float32) uint16) element {
	return element{
		code, 2,
		func(at *byte) float64 { return float64(from(*(*uint16)(unsafe.Pointer(at)))) },
		func(at *byte, value float64) { *(*uint16)(unsafe.Pointer(at)) = to(float32(value)) },
		nil,
		func(value ort.Value) []byte { return value.(*ort.CustomDataTensor).GetData() },
	}
}

func (e *element) isHalf() bool { return e.scalar == nil }

// bytesOf are the bytes of a tensor. They stay valid after it is destroyed.
func bytesOf[T ort.TensorData](value ort.Value) []byte {
	var data []T
	switch tensor := value.(type) {
	case *ort.CustomDataTensor:
		return tensor.GetData()
	case *ort.Tensor[T]:
		data = tensor.GetData()
	case *ort.Scalar[T]:
		data = []T{tensor.GetData()}
	}
	var one T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(data))), len(data)*int(unsafe.Sizeof(one)))
}

// kindOf is the element type of a tensor, with its name.
func kindOf(value ort.Value) (string, element) {
	name, known := names[ort.TensorElementDataType(value.DataType())]
	if !known {
		panic(fmt.Sprintf("a tensor of %T, which no contract has", value))
	}
	return name, elements[name]
}

// fill makes a tensor whose element i is at(i); zeros where that is nil. It may have no elements.
func fill(dtype string, shape []int64, at func(i int64) float64) (ort.Value, error) {
	kind, size := elements[dtype], product(shape)
	if len(shape) == 0 {
		value := 0.0
		if at != nil {
			value = at(0)
		}
		return kind.scalar(value)
	}
	data := make([]byte, max(1, size*kind.width)) // the binding takes no slice without bytes
	for i := int64(0); at != nil && i < size; i++ {
		kind.write(&data[i*kind.width], at(i))
	}
	return ort.NewCustomDataTensor(shape, data, kind.code)
}

// floats are the elements of a tensor. Those of float32 are not copied.
func floats(value ort.Value) []float32 {
	_, kind := kindOf(value)
	data := kind.bytes(value)
	if kind.code == ort.TensorElementDataTypeFloat {
		return unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(data))), len(data)/4)
	}
	numbers := make([]float32, product(value.GetShape()))
	for i := range numbers {
		numbers[i] = float32(kind.read(&data[int64(i)*kind.width]))
	}
	return numbers
}

// part is a range of a tensor along some axis.
type part struct {
	value    ort.Value
	from, to int64
}

// join makes a tensor of parts along an axis. It copies bytes, whatever the elements are.
func join(axis int, parts ...part) (ort.Value, error) {
	_, kind := kindOf(parts[0].value)
	shape := parts[0].value.GetShape()
	blocks, row := product(shape[:axis]), product(shape[axis+1:])*kind.width
	lengths := make([]int64, len(parts))
	shape[axis] = 0
	for i, part := range parts {
		lengths[i] = part.value.GetShape()[axis]
		if part.from < 0 || part.from > part.to || part.to > lengths[i] {
			return nil, fmt.Errorf("entries %d to %d of %d", part.from, part.to, lengths[i])
		}
		shape[axis] += part.to - part.from
	}
	joined := make([]byte, 0, max(1, product(shape)*kind.width))
	for block := range blocks {
		for i, part := range parts {
			start := block * lengths[i]
			joined = append(joined, kind.bytes(part.value)[(start+part.from)*row:(start+part.to)*row]...)
		}
	}
	return ort.NewCustomDataTensor(shape, joined[:cap(joined)], kind.code)
}

// overwrite writes the entries of a tensor into another one along an axis, from an entry on.
func overwrite(into, from ort.Value, axis int, start int64) error {
	_, kind := kindOf(into)
	shape, count := into.GetShape(), from.GetShape()[axis]
	if start+count > shape[axis] {
		return fmt.Errorf("there is no room for %d entries after %d of %d", count, start, shape[axis])
	}
	target, source, row := kind.bytes(into), kind.bytes(from), product(shape[axis+1:])*kind.width
	for block := range product(shape[:axis]) {
		copy(target[(block*shape[axis]+start)*row:], source[block*count*row:(block+1)*count*row])
	}
	return nil
}

func release(values map[string]ort.Value) {
	for _, value := range values {
		value.Destroy()
	}
	clear(values)
}

func product(sizes []int64) int64 {
	all := int64(1)
	for _, size := range sizes {
		all *= size
	}
	return all
}

// rectangle is the shape of rows, which must have the same length.
func rectangle(rows [][]int64) ([]int64, error) {
	if len(rows) == 0 || len(rows[0]) == 0 {
		return nil, errors.New("there is nothing in it")
	}
	for _, row := range rows {
		if len(row) != len(rows[0]) {
			return nil, fmt.Errorf("the rows must have the same length, not %d and %d", len(rows[0]), len(row))
		}
	}
	return []int64{int64(len(rows)), int64(len(rows[0]))}, nil
}

// toBrain rounds to the nearest bfloat16.
func toBrain(number float32) uint16 {
	bits := math.Float32bits(number)
	if number != number {
		return uint16(bits>>16) | 0x40
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

func fromBrain(bits uint16) float32 { return math.Float32frombits(uint32(bits) << 16) }
