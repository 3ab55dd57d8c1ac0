package decodeloop

import (
	"errors"
	"fmt"
	"slices"

	ort "github.com/yalue/onnxruntime_go"
)

// Names of what no output of the model has: no name of a model has a NUL.
const (
	source    = "\x00source"    // of what Encode was given
	reordered = "\x00reordered" // of encoder states in the order of the sequences
)

// past is what a slot is fed next: what a call has made of it, else what the encoder has.
func (d *Decoder) past(slot *Slot) ort.Value {
	if value := d.cache[slot.Past]; value != nil {
		return value
	}
	return d.encoded[slot.Made]
}

// states are those of the encoder; without one the source itself.
func (d *Decoder) states() ort.Value {
	if states := d.cache[reordered]; states != nil {
		return states
	}
	if call := d.contract.Calls.Encode; call != nil {
		return d.encoded[call.States]
	}
	return d.encoded[source]
}

// begin gives the cache the zeros that the first call is fed.
func (d *Decoder) begin(batch int64) error {
	for _, slot := range d.contract.Slots {
		if slot.FedZeros {
			shape, _ := resolve(slot.Dims, map[string]int64{
				"batch": batch, "batch_heads": batch * slot.Heads, "capacity": d.capacity,
				"past": slot.FirstLength, "encoder": slot.FirstLength,
			}, 1)
			value, err := fill(slot.DType, shape, nil)
			if err != nil {
				return fmt.Errorf("cache %q: %w", slot.Past, err)
			}
			d.cache[slot.Past] = value
		}
	}
	return nil
}

// carry takes out of the outputs what the cache becomes. Nothing is replaced until all of it is there.
func (d *Decoder) carry(outputs map[string]ort.Value, first bool) error {
	return d.change(func(slot *Slot) (ort.Value, error) {
		name := slot.Present
		if first {
			name = slot.Made
		}
		present, ok := outputs[name]
		if !ok || first && slot.ByEncoder {
			return nil, nil
		}
		if !slot.copies() {
			delete(outputs, name)
			return present, nil
		}
		past, axis := d.cache[slot.Past], *slot.LengthAxis
		length, count := past.GetShape()[axis], present.GetShape()[axis]
		switch slot.Carry {
		case "append":
			return join(axis, part{past, 0, length}, part{present, 0, count})
		case "shift":
			return join(axis, part{past, min(count, length), length}, part{present, 0, count})
		case "drop-oldest":
			return join(axis, part{present, 1, count})
		}
		// Written after the tokens that are there, where nothing is read before the call has succeeded.
		return nil, overwrite(past, present, axis, d.length)
	})
}

// change replaces the values of slots by others, all or none; nil leaves one as it is.
func (d *Decoder) change(make func(*Slot) (ort.Value, error)) error {
	next := map[string]ort.Value{}
	for i := range d.contract.Slots {
		slot := &d.contract.Slots[i]
		value, err := make(slot)
		if err != nil {
			release(next)
			return fmt.Errorf("cache %q: %w", slot.Past, err)
		}
		if value != nil {
			next[slot.Past] = value
		}
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
	if !d.contract.Rewinds {
		return errors.New("a part of the cache of this model cannot go back")
	}
	shortest := d.length - slices.Max(append([]int64{0}, d.padding...))
	if count < 0 || count >= shortest {
		return fmt.Errorf("cannot forget %d of %d tokens", count, shortest)
	}
	err := d.change(func(slot *Slot) (ort.Value, error) {
		if slot.Rewinds != "cut" || slot.LengthAxis == nil || count == 0 {
			return nil, nil
		}
		return join(*slot.LengthAxis, part{d.past(slot), 0, d.length - count})
	})
	if err != nil {
		return err
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
	var states ort.Value
	if d.states() != nil {
		value, err := choose(d.states(), 0, rows, 1)
		if err != nil {
			return fmt.Errorf("encoder states: %w", err)
		}
		states = value
	}
	err := d.change(func(slot *Slot) (ort.Value, error) {
		if slot.BatchAxis == nil || d.past(slot) == nil {
			return nil, nil
		}
		each := int64(1)
		if slot.Dims[*slot.BatchAxis].Axis == "batch_heads" {
			each = slot.Heads
		}
		return choose(d.past(slot), *slot.BatchAxis, rows, each)
	})
	if states != nil && err != nil {
		states.Destroy()
	} else if states != nil {
		d.replace(map[string]ort.Value{reordered: states})
	}
	if err != nil {
		return err
	}
	d.padding, d.mask = pick(d.padding, rows), pick(d.mask, rows)
	d.history = pick(d.history, rows)
	for i := range d.history {
		d.history[i] = slices.Clone(d.history[i])
	}
	return nil
}

// pick are the chosen ones of some values, or nil of nil.
func pick[T any](values []T, chosen []int64) []T {
	if values == nil {
		return nil
	}
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
