package decodeloop

import (
	"context"
	"errors"
	"fmt"
	"slices"

	ort "github.com/yalue/onnxruntime_go"
)

// graph is one file of the model. Its session has the inputs and outputs of one of the calls that go to it.
type graph struct {
	file            string
	inputs, outputs []string
	session         *ort.DynamicAdvancedSession
	options         *ort.RunOptions // by which a call is ended
}

// feeds is what a call is fed besides the cache and the source.
type feeds struct {
	tokens   *table
	embedded map[string]ort.Value
}

func (c *Call) follows(rule string) bool {
	return slices.ContainsFunc(c.Inputs, func(one Input) bool { return one.Rule == rule })
}

// call runs one call. The caller owns the outputs that it returns.
func (d *Decoder) call(
	ctx context.Context, call *Call, sizes map[string]int64, fed feeds,
) (map[string]ort.Value, error) {
	inputs := make(map[string]ort.Value, len(call.Inputs)+len(call.Pasts))
	made := make([]ort.Value, 0, len(call.Inputs)) // the others belong to the decoder
	defer func() {
		for _, value := range made {
			value.Destroy()
		}
	}()
	for i := range call.Inputs {
		one := &call.Inputs[i]
		switch one.Rule {
		case "embeddings":
			inputs[one.Name] = fed.embedded[one.Made]
		case "encoder-input":
			if inputs[one.Name] = d.source; d.contract.Calls.Encode == nil {
				inputs[one.Name] = d.states // the same, in the order of the sequences
			}
		case "encoder-states":
			inputs[one.Name] = d.states
		default:
			shape, at := d.rule(one, sizes, fed.tokens)
			value, err := fill(one.DType, shape, at)
			if err != nil {
				return nil, fmt.Errorf("input %q: %w", one.Name, err)
			}
			inputs[one.Name] = value
			made = append(made, value)
		}
	}
	for _, past := range call.Pasts {
		inputs[past] = d.cache[past]
	}
	for name, value := range inputs {
		if value == nil {
			return nil, fmt.Errorf("input %q: the contract names nothing that makes it", name)
		}
	}
	outputs, err := d.reserve(call, sizes)
	if err != nil {
		return nil, err
	}
	err = d.graphs[call.File].run(ctx, inputs, outputs, call.Outputs)
	if d.trace != nil {
		err = errors.Join(err, d.note(call.File, inputs, outputs, err))
	}
	if err != nil {
		release(outputs)
		return nil, fmt.Errorf("run %q: %w", call.File, err)
	}
	return outputs, nil
}

// room is an output that the binding cannot allocate: the program makes it before the call.
type room struct {
	name, dtype string
	dims        []Dim
	slot        *Slot
}

// rooms are the outputs of a call that need room made for them: those of types that Go does not have, those without
// axes, and all of a call that returns others than its session: the binding has one list of outputs for a session.
func (d *Decoder) rooms(call *Call) []room {
	all := []room{{call.Logits, call.LogitsType, call.LogitsDims, nil}, {call.States, d.statesType(), call.StatesDims, nil}}
	encode, first := call == d.contract.Calls.Encode, call == d.contract.Calls.Prefill
	for i := range d.contract.Slots {
		slot := &d.contract.Slots[i]
		switch {
		case encode && slot.ByEncoder || first && !slot.ByEncoder:
			all = append(all, room{slot.Made, slot.DType, slot.Dims, slot})
		case call == d.contract.Calls.Decode:
			all = append(all, room{slot.Present, slot.DType, slot.Dims, slot})
		}
	}
	if call == d.contract.Calls.Embed {
		for _, taker := range []*Call{d.contract.Calls.Prefill, d.contract.Calls.Decode} {
			for _, one := range taker.Inputs {
				all = append(all, room{one.Made, one.DType, one.Dims, nil})
			}
		}
	}
	bound := !slices.Equal(d.graphs[call.File].outputs, call.Outputs)
	return slices.DeleteFunc(all, func(one room) bool {
		kind, scalar := elements[one.dtype], one.slot != nil && len(one.dims) == 0
		return !slices.Contains(call.Outputs, one.name) || !(bound || kind.isHalf() || scalar)
	})
}

// countable fails where the size of an output is not known before the call.
func (d *Decoder) countable(call *Call, one room) error {
	counted := map[string]int64{"batch": 1, "batch_heads": 1, "new": 1, "past": 1, "total": 1, "capacity": 1}
	if given := d.contract.Source; given != nil {
		// An encoder may shorten features; it returns a state for each token of a text.
		if call != d.contract.Calls.Encode || given.DType == "int64" || given.DType == "int32" {
			counted["encoder"], counted["encoder_input"] = 1, 1
		}
	}
	if len(one.dims) == 0 && one.slot == nil {
		return errors.New("the contract has no shape of it")
	}
	_, err := resolve(one.dims, counted, 0)
	return err
}

func (d *Decoder) statesType() string {
	for _, call := range d.contract.calls() {
		for _, one := range call.Inputs {
			if one.Rule == "encoder-states" {
				return one.DType
			}
		}
	}
	return "float" // nothing takes them
}

// reserve makes room for outputs.
func (d *Decoder) reserve(call *Call, sizes map[string]int64) (map[string]ort.Value, error) {
	made := make(map[string]ort.Value, len(call.Outputs))
	for _, one := range d.reserved[call] {
		if made[one.name] != nil {
			continue
		}
		value, err := one.make(sizes)
		if err != nil {
			release(made)
			return nil, fmt.Errorf("output %q: %w", one.name, err)
		}
		made[one.name] = value
	}
	return made, nil
}

func (r *room) make(sizes map[string]int64) (ort.Value, error) {
	own := map[string]int64{}
	for axis, size := range sizes {
		own[axis] = size
	}
	if r.slot != nil {
		own["past"], own["batch_heads"] = sizes["total"], sizes["batch"]*r.slot.Heads
	}
	shape, err := resolve(r.dims, own, 0)
	if err != nil {
		return nil, err
	}
	if r.slot != nil && r.slot.copies() {
		switch axis := *r.slot.LengthAxis; r.slot.Carry {
		case "append", "write", "shift":
			shape[axis] = sizes["new"]
		case "drop-oldest":
			shape[axis]++
		}
	}
	return fill(r.dtype, shape, nil)
}

// run runs a graph; outputs has those with room made for them, and then all. A context that is done ends the call.
func (g *graph) run(ctx context.Context, inputs, outputs map[string]ort.Value, names []string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if !slices.Equal(names, g.outputs) {
		return g.runBound(inputs, outputs)
	}
	fed, got := make([]ort.Value, len(g.inputs)), make([]ort.Value, len(g.outputs))
	for i, name := range g.inputs {
		if fed[i] = inputs[name]; fed[i] == nil {
			return fmt.Errorf("the contract feeds nothing to input %q in this call", name)
		}
	}
	for i, name := range g.outputs {
		got[i] = outputs[name] // nil: allocated by the binding
	}
	if err := g.runUntilDone(ctx, fed, got); err != nil {
		return errors.Join(ctx.Err(), err)
	}
	for i, name := range g.outputs {
		outputs[name] = got[i]
	}
	return nil
}

func (g *graph) runUntilDone(ctx context.Context, fed, got []ort.Value) error {
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		g.options.Terminate()
		close(ended)
	})
	err := g.session.RunWithOptions(fed, got, g.options)
	if !stop() {
		<-ended
		err = errors.Join(err, g.options.UnsetTerminate())
	}
	return err
}

// runBound runs a graph for the outputs that room was made for. The binding cannot end such a call.
func (g *graph) runBound(inputs, outputs map[string]ort.Value) error {
	binding, err := g.session.CreateIoBinding()
	if err != nil {
		return err
	}
	defer binding.Destroy()
	for name, value := range inputs {
		if err := binding.BindInput(name, value); err != nil {
			return err
		}
	}
	for name, value := range outputs {
		if err := binding.BindOutput(name, value); err != nil {
			return err
		}
	}
	return g.session.RunWithBinding(binding)
}
