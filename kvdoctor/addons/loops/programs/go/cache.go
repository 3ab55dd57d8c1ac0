package decodeloop

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	ort "github.com/yalue/onnxruntime_go"
)

// source is the name of what Encode was given: no name of a model has a NUL.
const source = "\x00source"

// value is what an input of the cache or of the encoder is fed next: what a call has made of it, else what the encoder has.
func (d *Decoder) value(name string) ort.Value {
	if value := d.cache[name]; value != nil {
		return value
	}
	return d.encoded[name]
}

// begin gives the cache the zeros that the first call is fed.
func (d *Decoder) begin(batch int64) error {
	for _, slot := range d.contract.Slots {
		if slot.Zeros == nil {
			continue
		}
		sizes := map[string]int64{"batch": batch, "batch_heads": batch * slot.Heads, "capacity": d.capacity}
		shape, err := resolve(slot.Zeros, sizes, 1)
		if err != nil {
			return err
		}
		value, err := fill(slot.DType, shape, nil)
		if err != nil {
			return fmt.Errorf("cache %q: %w", slot.Past, err)
		}
		d.cache[slot.Past] = value
	}
	return nil
}

// carry takes out of the outputs of a call what the cache becomes. Nothing is replaced until all of it is there.
func (d *Decoder) carry(call *Call, outputs map[string]ort.Value) error {
	next := map[string]ort.Value{}
	for _, fill := range call.Fills {
		value, err := d.next(&d.contract.Slots[fill.Slot], fill.Carry, outputs[fill.Output])
		if err != nil {
			release(next)
			return fmt.Errorf("cache %q: %w", d.contract.Slots[fill.Slot].Past, err)
		}
		if value == outputs[fill.Output] {
			delete(outputs, fill.Output)
		}
		if value != nil {
			next[d.contract.Slots[fill.Slot].Past] = value
		}
	}
	d.replace(next)
	return nil
}

// next is the next value of a slot: the output itself or what is made of it; nil where it is written into the past.
func (d *Decoder) next(slot *Slot, carry string, present ort.Value) (ort.Value, error) {
	if carry == "feed-back" {
		return present, nil
	}
	past, axis := d.cache[slot.Past], *slot.LengthAxis
	length, count := past.GetShape()[axis], present.GetShape()[axis]
	switch carry {
	case "append":
		return join(axis, part{past, 0, length}, part{present, 0, count})
	case "shift":
		return join(axis, part{past, min(count, length), length}, part{present, 0, count})
	case "drop-oldest":
		return join(axis, part{present, 1, count})
	}
	// After the tokens that are there, where nothing is read before the call has succeeded.
	return nil, overwrite(past, present, axis, d.length)
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
	cut := map[string]ort.Value{}
	for _, slot := range d.contract.Slots {
		if slot.Rewinds != "cut" || slot.LengthAxis == nil || count == 0 {
			continue
		}
		value, err := join(*slot.LengthAxis, part{d.value(slot.Past), 0, d.length - count})
		if err != nil {
			release(cut)
			return fmt.Errorf("cache %q: %w", slot.Past, err)
		}
		cut[slot.Past] = value
	}
	d.replace(cut)
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
	all := maps.Clone(d.encoded)
	maps.Copy(all, d.cache)
	chosen := map[string]ort.Value{}
	for name, value := range all {
		slot := Slot{BatchAxis: new(int), Heads: 1} // encoder states
		if at := slices.IndexFunc(d.contract.Slots, func(one Slot) bool { return one.Past == name }); at >= 0 {
			slot = d.contract.Slots[at]
		} else if name == source {
			slot.BatchAxis = d.contract.Source.BatchAxis
		}
		if slot.BatchAxis == nil {
			continue
		}
		value, err := choose(value, *slot.BatchAxis, rows, slot.Heads)
		if err != nil {
			release(chosen)
			return fmt.Errorf("cache %q: %w", name, err)
		}
		chosen[name] = value
	}
	d.replace(chosen)
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
