package decodeloop

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
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
		wanted := []int64{shape[0], shape[d.contract.SourceAxis]}
		if got, err := rectangle(mask); err != nil || !slices.Equal(got, wanted) {
			return errors.Join(fmt.Errorf("mask: it has shape %v, not %v", wanted, got), err)
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
		if given.BatchAxis != nil {
			batch = shape[*given.BatchAxis]
		}
		made, err := d.call(ctx, call, batch, nil)
		if err != nil {
			d.Reset()
			return err
		}
		for _, fill := range call.Fills {
			d.encoded[d.contract.Slots[fill.Slot].Past] = made[fill.Output]
			delete(made, fill.Output)
		}
		maps.Copy(d.encoded, made)
	}
	return nil
}

func (i *Input) isIDs() bool { return i.DType == "int64" || i.DType == "int32" }

// sizes are what axes and numbers count in a call, by their names.
func (d *Decoder) sizes(call *Call, batch int64, tokens [][]int64) map[string]int64 {
	count := int64(0)
	if len(tokens) > 0 {
		count = int64(len(tokens[0]))
	}
	total := d.length + count
	sizes := map[string]int64{
		"batch": batch, "new": count, "last-new": count - 1, "past": d.length, "total": total, "last": total - 1,
		"capacity": d.capacity,
	}
	if value := d.encoded[source]; value != nil {
		sizes["encoder_input"] = value.GetShape()[d.contract.SourceAxis]
	}
	if call.Encoder != nil {
		if value := d.value(cmp.Or(call.Encoder.Name, source)); value != nil {
			sizes["encoder"] = value.GetShape()[call.Encoder.Axis]
		}
	}
	return sizes
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
	past, ids, columns := sizes["past"], slices.Concat(tokens...), int64(1)
	if len(shape) > 0 {
		columns = max(shape[len(shape)-1], 1)
	}
	padding := func(int64) int64 { return 0 } // of the sequence that element i is of
	if one.BatchAxis != nil && len(d.padding) > 0 {
		each, batch := max(product(shape[*one.BatchAxis+1:]), 1), shape[*one.BatchAxis]
		padding = func(i int64) int64 { return d.padding[i/each%min(batch, int64(len(d.padding)))] }
	}
	switch one.Rule {
	case "tokens":
		if len(shape) == 1 {
			return []int64{int64(len(ids))}, func(i int64) float64 { return float64(ids[i]) }
		}
		return []int64{int64(len(tokens)), sizes["new"]}, func(i int64) float64 { return float64(ids[i]) }
	case "token-and-position":
		return shape, func(i int64) float64 { return float64([]int64{ids[i/2], past}[i%2]) }
	case "rows":
		return shape, func(i int64) float64 { return float64(i / max(product(shape[1:]), 1)) }
	case "attention-mask", "padding-mask", "window-mask", "causal-mask":
		return shape, one.mask(shape, sizes, padding)
	case "positions":
		return shape, func(i int64) float64 { return float64(max(past+i%columns-padding(i), 0)) }
	case "encoder-mask":
		if mask := slices.Concat(d.mask...); int64(len(mask)) == product(shape) { // else it belongs to the encoder's input
			return shape, func(i int64) float64 { return float64(mask[i]) }
		}
		return shape, func(int64) float64 { return 1 }
	}
	number := float64(sizes[one.Count]) + one.Value
	return shape, func(int64) float64 { return number }
}

// mask shows what is seen: from the first token to the last one, or in a row to its own token.
func (i *Input) mask(shape []int64, sizes map[string]int64, padding func(int64) int64) func(int64) float64 {
	columns, rows, total, oldest := shape[len(shape)-1], int64(1), sizes["total"], int64(0)
	if i.FromRight { // the last token is in the last column
		oldest = columns - total
	}
	begin, end := padding, func(int64) int64 { return total }
	if i.RowsFrom != nil {
		rows = shape[len(shape)-2]
		before := sizes[*i.RowsFrom]
		begin = func(int64) int64 { return 0 }
		end = func(at int64) int64 { return before + at/columns%rows + 1 }
	}
	return func(at int64) float64 {
		if column := at%columns - oldest; begin(at) <= column && column < end(at) {
			return i.Shown
		}
		return i.Hidden
	}
}
