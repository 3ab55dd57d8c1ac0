package decodeloop

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	ort "github.com/yalue/onnxruntime_go"
)

// graph is one file of the model. Its session has the inputs and outputs of one of the calls that go to it.
type graph struct {
	inputs, outputs []string
	session         *ort.DynamicAdvancedSession
	options         *ort.RunOptions // by which a call is ended
}

func (c *Call) follows(rule string) bool {
	return slices.ContainsFunc(c.Inputs, func(one Input) bool { return one.Rule == rule })
}

// call runs one call on new tokens. The caller owns the outputs that it returns.
func (d *Decoder) call(ctx context.Context, call *Call, batch int64, tokens [][]int64) (map[string]ort.Value, error) {
	var embedded map[string]ort.Value
	if embed := d.contract.Calls.Embed; embed != nil && call.follows("embeddings") {
		made, err := d.call(ctx, embed, batch, tokens)
		if err != nil {
			return nil, err
		}
		defer release(made)
		embedded = made
	}
	sizes := d.sizes(call, batch, tokens)
	inputs, made := map[string]ort.Value{}, map[string]ort.Value{} // the others belong to the decoder
	defer release(made)
	for i := range call.Inputs {
		one := &call.Inputs[i]
		switch {
		case one.Rule == "embeddings":
			inputs[one.Name] = embedded[one.Made]
		case one.Rule == "encoder-input" || one.Rule == "encoder-states":
			inputs[one.Name] = d.value(cmp.Or(one.Made, source))
		default:
			shape, at := d.rule(one, sizes, tokens)
			value, err := fill(one.DType, shape, at)
			if err != nil {
				return nil, fmt.Errorf("input %q: %w", one.Name, err)
			}
			inputs[one.Name], made[one.Name] = value, value
		}
	}
	for _, past := range call.Pasts {
		inputs[past] = d.value(past)
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
	carry       string
}

// rooms are the outputs of a call that need room made for them: those of types that Go does not have, those without
// axes, and all of a call that returns others than its session: the binding has one list of outputs for a session. It
// fails where the size of one is not known before the call.
func (d *Decoder) rooms(call *Call) ([]room, error) {
	calls := &d.contract.Calls
	all := []room{{name: call.Logits, dtype: call.LogitsType, dims: call.LogitsDims}}
	for _, fill := range call.Fills {
		slot := &d.contract.Slots[fill.Slot]
		all = append(all, room{fill.Output, slot.DType, slot.Dims, slot, fill.Carry})
	}
	for _, one := range d.contract.inputs() { // what takes an output has its type and shape
		if call == calls.Encode || call == calls.Embed {
			all = append(all, room{name: one.Made, dtype: one.DType, dims: one.Dims})
		}
	}
	counted := map[string]int64{"batch": 1, "batch_heads": 1, "new": 1, "past": 1, "total": 1, "capacity": 1}
	// An encoder may shorten features; it returns a state for each token of a text.
	if given := d.contract.Source; given != nil && (call != calls.Encode || given.isIDs()) {
		counted["encoder"], counted["encoder_input"] = 1, 1
	}
	bound, needed := !slices.Equal(d.graphs[call.File].outputs, call.Outputs), []room{}
	for _, one := range all {
		kind, scalar := elements[one.dtype], one.slot != nil && len(one.dims) == 0
		if !slices.Contains(call.Outputs, one.name) || !bound && !kind.isHalf() && !scalar {
			continue
		}
		if _, err := resolve(one.dims, counted, 0); err != nil || len(one.dims) == 0 && one.slot == nil {
			return nil, fmt.Errorf("the binding for Go must know the shape of output %q before a call", one.name)
		}
		needed = append(needed, one)
	}
	return needed, nil
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
	if r.slot != nil {
		sizes = maps.Clone(sizes)
		sizes["past"], sizes["batch_heads"] = sizes["total"], sizes["batch"]*r.slot.Heads
	}
	shape, err := resolve(r.dims, sizes, 0)
	if err != nil {
		return nil, err
	}
	switch r.carry {
	case "append", "write", "shift":
		shape[*r.slot.LengthAxis] = sizes["new"]
	case "drop-oldest":
		shape[*r.slot.LengthAxis]++
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
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		g.options.Terminate()
		close(ended)
	})
	err := g.session.RunWithOptions(fed, got, g.options)
	if !stop() {
		<-ended
		err = errors.Join(ctx.Err(), err, g.options.UnsetTerminate())
	}
	for i, name := range g.outputs {
		if got[i] != nil {
			outputs[name] = got[i]
		}
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
