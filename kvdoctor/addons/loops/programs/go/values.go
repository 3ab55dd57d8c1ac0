package decodeloop

import "fmt"

// sizes are those of all axes in a call, by their names.
func (d *Decoder) sizes(batch, count int64) map[string]int64 {
	sizes := map[string]int64{
		"batch": batch, "new": count, "past": d.length, "total": d.length + count, "capacity": d.capacity,
	}
	if given := d.contract.Source; given != nil && d.source != nil {
		sizes["encoder_input"] = d.source.GetShape()[axisOf(given.Dims, "encoder_input", "encoder")]
		sizes["encoder"] = d.encoderLength(sizes["encoder_input"])
	}
	return sizes
}

// encoderLength is the number of encoder states; before they are there, that of the encoder's input.
func (d *Decoder) encoderLength(input int64) int64 {
	if d.states != nil && (d.contract.Calls.Encode != nil || d.contract.Source.Rule == "encoder-states") {
		return d.states.GetShape()[1]
	}
	for _, slot := range d.contract.Slots {
		if value := d.cache[slot.Past]; slot.CountsStates && slot.LengthAxis != nil && value != nil {
			if d.length > 0 || slot.ByEncoder {
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
func (d *Decoder) rule(one *Input, sizes map[string]int64, tokens *table) ([]int64, func(int64) float64) {
	shape, _ := resolve(one.Dims, sizes, 1)
	columns, past, total := int64(1), sizes["past"], sizes["total"]
	if len(shape) > 0 {
		columns = max(shape[len(shape)-1], 1)
	}
	switch one.Rule {
	case "tokens":
		if shape = tokens.shape; len(one.Dims) == 1 {
			shape = []int64{product(shape)}
		}
		return shape, func(i int64) float64 { return float64(tokens.data[i]) }
	case "token-and-position":
		return shape, func(i int64) float64 {
			if i%2 == 1 {
				return float64(past)
			}
			return float64(tokens.data[i/2])
		}
	case "rows":
		each := max(product(shape[1:]), 1)
		return shape, func(i int64) float64 { return float64(i / each) }
	case "attention-mask", "padding-mask", "window-mask":
		each, hides, first := max(product(shape[1:]), 1), one.Rule == "padding-mask", int64(0)
		if len(shape) == 1 {
			each = columns // of one sequence
		}
		if one.Rule == "window-mask" { // the last token is in the last column
			first = columns - total
		}
		return shape, func(i int64) float64 {
			column := i%columns - first
			return truth((d.padding[i/each] <= column && column < total) != hides)
		}
	case "causal-mask":
		rows, row, oldest := shape[len(shape)-2], past, int64(0)
		if one.Dims[len(shape)-2].Axis == "total" {
			row = 0
		}
		if one.FromRight { // the newest entry is in the last column
			oldest = columns - total
		}
		return shape, func(i int64) float64 {
			if column := i%columns - oldest; 0 <= column && column <= row+i/columns%rows {
				return one.Shown
			}
			return one.Hidden
		}
	case "positions":
		batch, count := int64(len(d.padding)), sizes["new"]
		if len(shape) < 2 {
			return shape, func(i int64) float64 { return float64(past + i%count) }
		}
		return shape, func(i int64) float64 { return float64(max(past+i%count-d.padding[i/count%batch], 0)) }
	case "encoder-mask":
		if mask := d.mask; mask.fits(shape) { // one of another length belongs to the encoder's input alone
			return shape, func(i int64) float64 { return float64(mask.data[i]) }
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
	case "first":
		return truth(sizes["past"] == 0)
	case "last":
		return float64(sizes["total"] - 1)
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
