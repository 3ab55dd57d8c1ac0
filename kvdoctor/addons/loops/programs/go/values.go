package decodeloop

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// Encode says what the sequences are about, in token ids: it runs the encoder, where the model has one. The mask has 0
// for padding on the right; without it all of the source is read, and shorter rows are padded.
func (d *Decoder) Encode(ctx context.Context, rows, mask [][]int64) error {
	longest, unequal := 0, false
	for _, row := range rows {
		unequal, longest = unequal || len(row) != len(rows[0]), max(longest, len(row))
		for _, id := range row {
			if id < 0 { // a Gather counts it from the end
				return fmt.Errorf("the ids of the source are 0 or more; got %d", id)
			}
		}
	}
	if unequal && mask == nil {
		padded := make([][]int64, len(rows))
		for i, row := range rows {
			rest := make([]int64, longest-len(row))
			padded[i] = slices.Concat(row, rest)
			mask = append(mask, slices.Concat(slices.Repeat([]int64{1}, len(row)), rest))
		}
		rows = padded
	}
	shape, err := rectangle(rows)
	if err != nil {
		return fmt.Errorf("source: %w", err)
	}
	ids := slices.Concat(rows...)
	return d.encode(ctx, shape, mask, func(i int64) float64 { return float64(ids[i]) })
}

// EncodeFloats is Encode for features of a picture or of sound, or for encoder states.
func (d *Decoder) EncodeFloats(ctx context.Context, source []float32, shape []int64, mask [][]int64) error {
	if len(source) == 0 || product(shape) != int64(len(source)) {
		return fmt.Errorf("the source must fill its shape: %d numbers for %v", len(source), shape)
	}
	return d.encode(ctx, shape, mask, func(i int64) float64 { return float64(source[i]) })
}

func (d *Decoder) encode(ctx context.Context, shape []int64, mask [][]int64, at func(int64) float64) error {
	given := d.contract.Source
	if given == nil {
		return errors.New("this model takes no source")
	}
	fits := len(shape) == len(given.Dims)
	for axis, dim := range given.Dims {
		fits = fits && (dim.Axis != "" || dim.Size == shape[axis])
	}
	if !fits {
		return fmt.Errorf("the source is %v, not %v", given.Dims, shape)
	}
	if mask != nil {
		masked := func(one Input) bool { return one.Rule == "encoder-mask" }
		if !slices.ContainsFunc(d.contract.inputs(), masked) {
			return errors.New("this model takes no mask of the source")
		}
		wanted := []int64{shape[0], shape[given.lengthAxis()]}
		if got, err := rectangle(mask); err != nil || !slices.Equal(got, wanted) {
			return errors.Join(fmt.Errorf("mask: it has shape %v, not %v", got, wanted), err)
		}
	}
	value, err := fill(given.DType, shape, at)
	if err != nil {
		return fmt.Errorf("source: %w", err)
	}
	d.Reset()
	d.encoded[source], d.sourceMask, d.mask = value, mask, mask
	if call := d.contract.Calls.Encode; call != nil {
		batch := shape[0]
		if axis := slices.Index(given.Dims, Dim{Axis: "batch"}); axis >= 0 {
			batch = shape[axis]
		}
		made, err := d.call(ctx, call, batch, nil)
		if err != nil {
			d.Reset()
			return err
		}
		for name, value := range made {
			d.encoded[name] = value
		}
	}
	return nil
}

func (i *Input) isIDs() bool { return i.DType == "int64" || i.DType == "int32" }

// lengthAxis is the axis of a source that counts its tokens or frames; else the last one.
func (i *Input) lengthAxis() int {
	for _, name := range []string{"encoder_input", "encoder"} {
		if axis := slices.Index(i.Dims, Dim{Axis: name}); axis >= 0 {
			return axis
		}
	}
	return len(i.Dims) - 1
}

// sizes are those of all axes in a call, by their names.
func (d *Decoder) sizes(batch int64, tokens [][]int64) map[string]int64 {
	count := int64(0)
	if len(tokens) > 0 {
		count = int64(len(tokens[0]))
	}
	sizes := map[string]int64{
		"batch": batch, "new": count, "past": d.length, "total": d.length + count, "capacity": d.capacity,
	}
	if value := d.encoded[source]; value != nil {
		sizes["encoder_input"] = value.GetShape()[d.contract.Source.lengthAxis()]
		sizes["encoder"] = d.encoderLength(sizes["encoder_input"])
	}
	return sizes
}

// encoderLength is the number of encoder states; before they are there, that of the encoder's input.
func (d *Decoder) encoderLength(input int64) int64 {
	if states := d.states(); states != nil && (d.contract.Calls.Encode != nil || d.contract.Source.Rule == "encoder-states") {
		return states.GetShape()[1]
	}
	for _, slot := range d.contract.Slots {
		if slot.CountsStates && slot.LengthAxis != nil && (d.length > 0 || slot.ByEncoder) {
			if value := d.past(&slot); value != nil {
				return value.GetShape()[*slot.LengthAxis]
			}
		}
	}
	return input
}

// resolve is a shape with the sizes that are known now. An axis of another name has one entry, or is an error where
// `otherwise` is 0.
func resolve(dims []Dim, sizes map[string]int64, otherwise int64) ([]int64, error) {
	shape := make([]int64, len(dims))
	for i, dim := range dims {
		size, known := sizes[dim.Axis]
		switch {
		case dim.Axis == "":
			shape[i] = dim.Size
		case known:
			shape[i] = size
		case otherwise > 0:
			shape[i] = otherwise
		default:
			return nil, fmt.Errorf("axis %q is counted by nothing", dim.Axis)
		}
	}
	return shape, nil
}

// rule is the shape of an input, and its element i as a function of i.
func (d *Decoder) rule(one *Input, sizes map[string]int64, tokens [][]int64) ([]int64, func(int64) float64) {
	shape, _ := resolve(one.Dims, sizes, 1)
	past, total, count := sizes["past"], sizes["total"], sizes["new"]
	columns, queries, each := int64(1), int64(1), int64(1) // each: elements of one sequence
	if rank := len(shape); rank > 0 {
		columns, each = max(shape[rank-1], 1), max(product(shape[1:]), 1)
		if rank == 1 {
			each = columns
		} else {
			queries = max(shape[rank-2], 1)
		}
	}
	oldest := int64(0)
	if one.FromRight || one.Rule == "window-mask" { // the last token is in the last column
		oldest = columns - total
	}
	// shown reports whether element i of a mask is for a place from the first one on and before the end.
	shown := func(i, first, end int64) bool {
		column := i%columns - oldest
		return first <= column && column < end
	}
	switch ids := slices.Concat(tokens...); one.Rule {
	case "tokens":
		if len(shape) != 1 {
			shape = []int64{int64(len(tokens)), count}
		} else {
			shape = []int64{int64(len(ids))}
		}
		return shape, func(i int64) float64 { return float64(ids[i]) }
	case "token-and-position":
		return shape, func(i int64) float64 { return float64([]int64{ids[i/2], past}[i%2]) }
	case "rows":
		return shape, func(i int64) float64 { return float64(i / max(product(shape[1:]), 1)) }
	case "attention-mask", "window-mask":
		return shape, func(i int64) float64 { return truth(shown(i, d.padding[i/each], total)) }
	case "padding-mask":
		return shape, func(i int64) float64 { return truth(!shown(i, d.padding[i/each], total)) }
	case "causal-mask":
		before := past
		if one.Dims[len(shape)-2].Axis == "total" {
			before = 0
		}
		return shape, func(i int64) float64 {
			if shown(i, 0, before+i/columns%queries+1) {
				return one.Shown
			}
			return one.Hidden
		}
	case "positions":
		if len(shape) < 2 {
			return shape, func(i int64) float64 { return float64(past + i%count) }
		}
		batch := int64(len(d.padding))
		return shape, func(i int64) float64 { return float64(max(past+i%count-d.padding[i/count%batch], 0)) }
	case "encoder-mask":
		if mask := slices.Concat(d.mask...); int64(len(mask)) == product(shape) { // else it belongs to the encoder's input
			return shape, func(i int64) float64 { return float64(mask[i]) }
		}
		return shape, func(int64) float64 { return 1 }
	}
	number := one.number(sizes)
	return shape, func(int64) float64 { return number }
}

func (i *Input) number(sizes map[string]int64) float64 {
	switch i.Count {
	case "past", "total", "new", "batch", "encoder_input":
		return float64(sizes[i.Count])
	case "last-new":
		return float64(sizes["new"] - 1)
	case "last":
		return float64(sizes["total"] - 1)
	case "first":
		return truth(sizes["past"] == 0)
	case "cached":
		return truth(sizes["past"] > 0)
	}
	return i.Value
}

func truth(holds bool) float64 {
	if holds {
		return 1
	}
	return 0
}
