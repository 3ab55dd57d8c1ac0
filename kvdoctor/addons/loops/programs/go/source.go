package decodeloop

import (
	"context"
	"errors"
	"fmt"
	"slices"

	ort "github.com/yalue/onnxruntime_go"
)

// Encode says what the sequences are about, in token ids: it runs the encoder, where the model has one. The mask has 0
// for padding on the right; without it all of the source is read.
func (d *Decoder) Encode(ctx context.Context, source, mask [][]int64) error {
	ids, err := rectangle(source)
	if err != nil {
		return fmt.Errorf("source: %w", err)
	}
	for _, id := range ids.data {
		if id < 0 { // a Gather counts it from the end
			return fmt.Errorf("the ids of the source are 0 or more; got %d", id)
		}
	}
	return d.encode(ctx, ids.shape, mask, func(i int64) float64 { return float64(ids.data[i]) })
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
	if len(shape) != len(given.Dims) {
		return fmt.Errorf("the source has %d axes, not %d", len(given.Dims), len(shape))
	}
	for axis, dim := range given.Dims {
		if dim.Axis == "" && dim.Size != shape[axis] {
			return fmt.Errorf("axis %d of the source has size %d, not %d", axis, dim.Size, shape[axis])
		}
	}
	var hidden *table
	if mask != nil {
		rows, err := d.maskOf(mask, []int64{shape[0], shape[axisOf(given.Dims, "encoder_input", "encoder")]})
		if err != nil {
			return fmt.Errorf("mask: %w", err)
		}
		hidden = &rows
	}
	source, err := fill(given.DType, shape, at)
	if err != nil {
		return fmt.Errorf("source: %w", err)
	}
	d.Reset()
	d.source, d.sourceMask, d.mask = source, hidden, hidden
	if call := d.contract.Calls.Encode; call != nil {
		batch := shape[0]
		if axis := axisOf(given.Dims, "batch"); given.Dims[axis].Axis == "batch" {
			batch = shape[axis]
		}
		if d.encoded, err = d.call(ctx, call, d.sizes(batch, 0), feeds{}); err != nil {
			d.encoded = map[string]ort.Value{}
			d.Reset()
			return err
		}
	}
	return nil
}

func (d *Decoder) maskOf(mask [][]int64, shape []int64) (table, error) {
	for _, call := range d.contract.calls() {
		if slices.ContainsFunc(call.Inputs, func(one Input) bool { return one.Rule == "encoder-mask" }) {
			rows, err := rectangle(mask)
			if err == nil && !rows.fits(shape) {
				err = fmt.Errorf("it has shape %v, not %v", shape, rows.shape)
			}
			return rows, err
		}
	}
	return table{}, errors.New("this model takes no mask of the source")
}

// axisOf is the first axis that counts one of these; else the last one.
func axisOf(dims []Dim, counted ...string) int {
	for _, name := range counted {
		if axis := slices.Index(dims, Dim{Axis: name}); axis >= 0 {
			return axis
		}
	}
	return len(dims) - 1
}
