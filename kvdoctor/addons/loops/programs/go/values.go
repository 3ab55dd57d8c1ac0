package decodeloop

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	ort "github.com/yalue/onnxruntime_go"
)

// Encode says what the sequences are about, in token ids: it runs the encoder, where the model has one. Shorter rows are
// padded on the right, and masked.
func (d *Decoder) Encode(ctx context.Context, rows [][]int64) error {
	longest, ids, mask := 0, []int64{}, [][]int64{}
	for _, row := range rows {
		longest = max(longest, len(row))
	}
	for _, row := range rows {
		rest := make([]int64, longest-len(row))
		ids = slices.Concat(ids, row, rest)
		mask = append(mask, slices.Concat(slices.Repeat([]int64{1}, len(row)), rest))
	}
	if len(ids) == 0 || slices.Min(ids) < 0 { // a Gather counts it from the end
		return fmt.Errorf("the ids of the source are 0 or more, and there is one; got %v", rows)
	}
	if !slices.Contains(slices.Concat(mask...), 0) {
		mask = nil
	}
	shape := []int64{int64(len(rows)), int64(longest)}
	return d.encode(ctx, shape, mask, func(i int64) float64 { return float64(ids[i]) })
}

// EncodeFloats is Encode for features of a picture or of sound, or for encoder states. The mask has 0 for padding on the
// right; without it all of the source is read.
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
	fits := func(size int64, dim Dim) bool { return dim.Axis != "" || dim.Size == size }
	if !slices.EqualFunc(shape, given.Dims, fits) {
		return fmt.Errorf("the source is %v, not %v", given.Dims, shape)
	}
	if mask != nil {
		if !given.Masked {
			return errors.New("this model takes no mask of the source")
		}
		wanted := []int64{shape[0], shape[given.LengthAxis]}
		if got, err := rectangle(mask); err != nil || !slices.Equal(got, wanted) {
			return errors.Join(fmt.Errorf("mask: it has shape %v, not %v", wanted, got), err)
		}
	}
	value, err := fill(given.DType, shape, at)
	if err != nil {
		return fmt.Errorf("source: %w", err)
	}
	d.Reset()
	batch := int64(1)
	if given.BatchAxis != nil {
		batch = shape[*given.BatchAxis]
	}
	d.encoded[source], d.sourceMask, d.mask = value, mask, mask
	if _, err := d.runCalls(ctx, d.contract.Calls.Encode, make([][]int64, batch)); err != nil {
		d.Reset()
		return err
	}
	maps.Copy(d.encoded, d.cache)
	clear(d.cache)
	return nil
}

// sizes are what axes and sums count in a call.
func (d *Decoder) sizes(tokens [][]int64) map[string]int64 {
	batch, count := int64(len(tokens)), int64(len(tokens[0]))
	return map[string]int64{
		"one": 1, "batch": batch, "batch_heads": batch * d.contract.Heads, "new": count, "past": d.length,
		"total": d.length + count, "capacity": d.capacity,
	}
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

// make makes an input for a call.
func (d *Decoder) make(one *Made, sizes map[string]int64, tokens [][]int64) (ort.Value, error) {
	shape, _ := resolve(one.Dims, sizes, 1)
	last, columns, rows, copied := len(shape)-1, int64(1), int64(1), [][]int64(nil)
	if last >= 0 && (one.BatchAxis == nil || *one.BatchAxis != last) {
		columns = shape[last]
	}
	if last > 0 {
		rows = shape[last-1]
	}
	if one.Copy == "tokens" {
		copied = tokens
	} else if one.Copy == "mask" {
		copied = d.mask
	}
	sizes = maps.Clone(sizes)
	elements := make([]float64, product(shape))
	for row := int64(0); row*columns < int64(len(elements)); row++ {
		sequence, padding := int64(0), int64(0)
		if axis := one.BatchAxis; axis != nil {
			sequence = row / product(shape[min(*axis+1, last):last]) % shape[*axis]
			if len(d.padding) > 0 {
				padding = d.padding[sequence]
			}
		}
		sizes["columns"], sizes["query"], sizes["sequence"], sizes["padding"] = columns, row%rows, sequence, padding
		begin, end, inside := sum(one.Begin, sizes), sum(one.End, sizes), sum(one.Inside, sizes)
		of := elements[row*columns : (row+1)*columns]
		for column := range of {
			of[column] = one.Outside
			if at := float64(column); begin <= at && at < end {
				of[column] = inside + one.Step*at
			}
		}
		if copied != nil && int64(len(copied[sequence])) <= columns { // else it is that of the encoder's input
			for column, value := range copied[sequence] {
				of[column] = float64(value)
			}
		}
	}
	return fill(one.DType, shape, func(i int64) float64 { return elements[i] })
}

func sum(terms map[string]float64, sizes map[string]int64) float64 {
	all := 0.0
	for name, factor := range terms {
		all += float64(sizes[name]) * factor
	}
	return all
}
