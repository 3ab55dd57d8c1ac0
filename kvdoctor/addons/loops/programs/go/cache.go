package decodeloop

import (
	"errors"
	"fmt"
	"slices"

	ort "github.com/yalue/onnxruntime_go"
)

// begin gives the cache what the first call is fed: what the encoder made of a slot, else zeros.
func (d *Decoder) begin(batch int64) error {
	sizes := map[string]int64{"batch": batch, "capacity": d.capacity}
	if d.states = d.source; d.contract.Calls.Encode != nil {
		d.states = d.encoded[d.contract.Calls.Encode.States]
	}
	for _, slot := range d.contract.Slots {
		if slot.ByEncoder {
			d.cache[slot.Past] = d.encoded[slot.Made]
		} else if slot.FedZeros {
			sizes["batch_heads"] = batch * slot.Heads
			sizes["past"], sizes["encoder"] = slot.FirstLength, slot.FirstLength
			shape, _ := resolve(slot.Dims, sizes, 1)
			value, err := fill(slot.DType, shape, nil)
			if err != nil {
				return fmt.Errorf("cache %q: %w", slot.Past, err)
			}
			d.replace(slot.Past, value)
		}
	}
	return nil
}

// replace gives the cache another value and destroys the one before.
func (d *Decoder) replace(past string, value ort.Value) {
	before := d.cache[past]
	d.cache[past] = value
	d.free(before)
}

// next is what the cache becomes; it takes values out of the outputs. Nothing is replaced until all of it is there.
func (d *Decoder) next(outputs map[string]ort.Value, first bool) (map[string]ort.Value, error) {
	next := make(map[string]ort.Value, len(d.contract.Slots))
	for i := range d.contract.Slots {
		slot := &d.contract.Slots[i]
		name := slot.Present
		if first {
			name = slot.Made
		}
		value, ok := outputs[name]
		if !ok || first && slot.ByEncoder {
			continue
		}
		if slot.copies() {
			if err := d.join(slot, value, next); err != nil {
				release(next)
				return nil, fmt.Errorf("cache %q: %w", slot.Past, err)
			}
			continue
		}
		delete(outputs, name)
		next[slot.Past] = value
	}
	return next, nil
}

// join adds the next past of a slot that the loop puts together.
func (d *Decoder) join(slot *Slot, present ort.Value, next map[string]ort.Value) (err error) {
	past, axis := d.cache[slot.Past], *slot.LengthAxis
	length, count := past.GetShape()[axis], present.GetShape()[axis]
	switch slot.Carry {
	case "append":
		next[slot.Past], err = join(axis, part{past, 0, length}, part{present, 0, count})
	case "shift":
		next[slot.Past], err = join(axis, part{past, min(count, length), length}, part{present, 0, count})
	case "drop-oldest":
		next[slot.Past], err = join(axis, part{present, 1, count})
	case "write": // after the tokens that are there, where nothing is read before the call has succeeded
		err = overwrite(past, present, axis, d.length)
	}
	return err
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
	cut := map[string]ort.Value{}
	for _, slot := range d.contract.Slots {
		if slot.Rewinds != "cut" || slot.LengthAxis == nil || count == 0 {
			continue
		}
		value, err := join(*slot.LengthAxis, part{d.cache[slot.Past], 0, d.length - count})
		if err != nil {
			release(cut)
			return fmt.Errorf("cache %q: %w", slot.Past, err)
		}
		cut[slot.Past] = value
	}
	for past, value := range cut {
		d.replace(past, value)
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
	for _, row := range rows {
		if row < 0 || row >= int64(len(d.history)) {
			return fmt.Errorf("there is no row %d among %d sequences", row, len(d.history))
		}
	}
	chosen := map[string]ort.Value{}
	states, err := d.chosen(rows, chosen)
	if err != nil {
		release(chosen)
		return err
	}
	for past, value := range chosen {
		d.replace(past, value)
	}
	if states != nil {
		d.free(d.states)
		d.states = states
	}
	if d.mask != nil {
		d.mask = d.mask.rows(rows)
	}
	padding, history := make([]int64, len(rows)), make([][]int64, len(rows))
	for i, row := range rows {
		padding[i], history[i] = d.padding[row], slices.Clone(d.history[row])
	}
	d.padding, d.history = padding, history
	return nil
}

// chosen adds copies of rows of the cache to a map, and returns those of the encoder states.
func (d *Decoder) chosen(rows []int64, chosen map[string]ort.Value) (states ort.Value, err error) {
	for _, slot := range d.contract.Slots {
		if slot.BatchAxis == nil {
			continue
		}
		each := int64(1)
		if slot.Dims[*slot.BatchAxis].Axis == "batch_heads" {
			each = slot.Heads
		}
		value, err := choose(d.cache[slot.Past], *slot.BatchAxis, rows, each)
		if err != nil {
			return nil, fmt.Errorf("cache %q: %w", slot.Past, err)
		}
		chosen[slot.Past] = value
	}
	if d.states == nil {
		return nil, nil
	}
	return choose(d.states, 0, rows, 1)
}

// clear forgets the sequences.
func (d *Decoder) clear() {
	for name, value := range d.cache {
		d.free(value)
		delete(d.cache, name)
	}
	d.free(d.states)
	d.states, d.mask = nil, nil
	d.length, d.padding, d.history = 0, nil, nil
}

// free destroys a value, unless the next sequences begin with it.
func (d *Decoder) free(value ort.Value) {
	if value == nil || value == d.source {
		return
	}
	for _, made := range d.encoded {
		if made == value {
			return
		}
	}
	value.Destroy()
}
