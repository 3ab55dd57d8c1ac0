package decodeloop

import (
	"errors"
	"fmt"
	"slices"

	ort "github.com/yalue/onnxruntime_go"
)

const source = "source"

// value is what an input of the cache or of the encoder is fed next: what a call has made of it, else what the encoder has.
func (d *Decoder) value(name string) ort.Value {
	if value := d.cache[name]; value != nil {
		return value
	}
	return d.encoded[name]
}

// begin gives the cache the zeros that the first call is fed.
func (d *Decoder) begin(batch int64) error {
	for _, one := range d.contract.Zeros {
		shape, err := resolve(one.Dims, d.sizes(make([][]int64, batch)), 1)
		if err != nil {
			return err
		}
		if d.cache[one.Value], err = fill(one.DType, shape, nil); err != nil {
			return fmt.Errorf("%s: %w", one.Value, err)
		}
	}
	return nil
}

// take takes out of the outputs of a call what the cache becomes. Nothing is replaced until all of it is there.
func (d *Decoder) take(takes []Take, outputs map[string]ort.Value) error {
	next := map[string]ort.Value{}
	for _, one := range takes {
		value, err := d.next(&one, outputs[one.Output])
		if err != nil {
			release(next)
			return fmt.Errorf("%s: %w", one.Value, err)
		}
		if value == outputs[one.Output] {
			delete(outputs, one.Output)
		}
		if value != nil {
			next[one.Value] = value
		}
	}
	d.replace(next)
	return nil
}

// next is the next value: the output itself or what is made of it; nil where it is written into the past.
func (d *Decoder) next(one *Take, present ort.Value) (ort.Value, error) {
	if one.Axis == nil {
		return present, nil
	}
	past, axis := d.cache[one.Value], *one.Axis
	length, count := past.GetShape()[axis], present.GetShape()[axis]
	switch one.Carry {
	case "write": // after the tokens that are there, where nothing is read before the call has succeeded
		return nil, overwrite(past, present, axis, d.length)
	case "drop-oldest":
		return join(axis, part{present, 1, count})
	case "shift":
		return join(axis, part{past, min(count, length), length}, part{present, 0, count})
	}
	return join(axis, part{past, 0, length}, part{present, 0, count})
}

// change replaces values by parts of them along an axis, all or none.
func (d *Decoder) change(axes []Axis, parts func(ort.Value, Axis) []part) error {
	next := map[string]ort.Value{}
	for _, one := range axes {
		value, err := join(one.Axis, parts(d.value(one.Value), one)...)
		if err != nil {
			release(next)
			return fmt.Errorf("%s: %w", one.Value, err)
		}
		next[one.Value] = value
	}
	d.replace(next)
	return nil
}

// replace gives the cache other values and destroys those before.
func (d *Decoder) replace(next map[string]ort.Value) {
	for name, value := range next {
		if before := d.cache[name]; before != nil {
			before.Destroy()
		}
		d.cache[name] = value
	}
}

// Rewind forgets the last tokens of every sequence. At least one token of each must stay.
func (d *Decoder) Rewind(count int64) error {
	if !d.contract.Rewinds || d.length > d.contract.ContextLimit { // what a ring has written over is gone
		return errors.New("a part of the cache of this model cannot go back")
	}
	shortest := d.length - slices.Max(append([]int64{0}, d.padding...))
	if count < 0 || count >= shortest {
		return fmt.Errorf("cannot forget %d of %d tokens", count, shortest)
	}
	if count > 0 {
		cut := func(value ort.Value, _ Axis) []part { return []part{{value, 0, d.length - count}} }
		if err := d.change(d.contract.Cut, cut); err != nil {
			return err
		}
	}
	d.length -= count
	for row, tokens := range d.history {
		d.history[row] = tokens[:int64(len(tokens))-count]
	}
	return nil
}

// Reorder makes sequence i a copy of what sequence rows[i] was, as a beam search needs it.
func (d *Decoder) Reorder(rows []int64) error {
	if !d.contract.Reorders {
		return errors.New("the sequences of this model cannot change places")
	}
	if d.length == 0 || len(rows) == 0 {
		return errors.New("there are no sequences to change, or none would be left")
	}
	if worst := slices.Max(rows); worst >= int64(len(d.history)) || slices.Min(rows) < 0 {
		return fmt.Errorf("the rows %v are not among %d sequences", rows, len(d.history))
	}
	chosen := func(value ort.Value, axis Axis) []part {
		parts := make([]part, len(rows))
		for i, row := range rows {
			parts[i] = part{value, row * axis.Each, (row + 1) * axis.Each}
		}
		return parts
	}
	if err := d.change(d.contract.Rows, chosen); err != nil {
		return err
	}
	if len(d.mask) == len(d.history) {
		d.mask = pick(d.mask, rows)
	}
	d.padding, d.history = pick(d.padding, rows), pick(d.history, rows)
	d.history = d.History() // each a copy of its own
	return nil
}

// pick are the chosen ones of some values.
func pick[T any](values []T, chosen []int64) []T {
	made := make([]T, len(chosen))
	for i, at := range chosen {
		made[i] = values[at]
	}
	return made
}

// clear forgets the sequences.
func (d *Decoder) clear() {
	release(d.cache)
	d.mask, d.length, d.padding, d.history = d.sourceMask, 0, nil, nil
}
