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
	inputs, outputs []string
	session         *ort.DynamicAdvancedSession
	options         *ort.RunOptions // by which a call is ended
}

// runCalls runs calls on new tokens and takes what they return of the cache; the logits of the last one, nil without.
func (d *Decoder) runCalls(ctx context.Context, calls []Call, tokens [][]int64) (logits Logits, err error) {
	for i := range calls {
		outputs, err := d.call(ctx, &calls[i], tokens)
		if err != nil {
			return nil, err
		}
		defer release(outputs)
		if err := d.take(calls[i].Takes, outputs); err != nil {
			return nil, err
		}
		if value := outputs[calls[i].Logits]; value != nil {
			logits = d.logits(value, int64(len(tokens)))
		}
	}
	return logits, nil
}

// call runs one call. The caller owns the outputs that it returns.
func (d *Decoder) call(ctx context.Context, call *Call, tokens [][]int64) (map[string]ort.Value, error) {
	sizes := d.sizes(tokens)
	for name, one := range call.Sizes {
		sizes[name] = d.value(one.Value).GetShape()[one.Axis]
	}
	inputs, made := map[string]ort.Value{}, map[string]ort.Value{} // the others belong to the decoder
	defer release(made)
	for name, value := range call.Values {
		inputs[name] = d.value(value)
	}
	for i := range call.Made {
		one := &call.Made[i]
		value, err := d.make(one, sizes, tokens)
		if err != nil {
			return nil, fmt.Errorf("input %q: %w", one.Name, err)
		}
		inputs[one.Name], made[one.Name] = value, value
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
}

// rooms are the outputs of a call that need room made for them: those of types that Go does not have, those without
// axes, and all of a call that returns others than its session: the binding has one list of outputs for a session. It
// fails where the size of one is not known before the call.
func (d *Decoder) rooms(call *Call, encodes bool) (needed []room, err error) {
	all := []room{{call.Logits, call.LogitsType, call.LogitsDims}}
	for _, one := range call.Takes {
		all = append(all, room{one.Output, one.DType, one.Dims})
	}
	counted := d.sizes([][]int64{{0}})
	counted["encoder"], counted["encoder_input"] = 1, 1
	if encodes && !d.contract.Source.isIDs() { // it may shorten features
		delete(counted, "encoder")
	}
	bound := !slices.Equal(d.graphs[call.File].outputs, call.Outputs)
	for _, one := range all {
		kind, scalar := elements[one.dtype], one.dims != nil && len(one.dims) == 0
		if one.name == "" || !bound && !kind.isHalf() && !scalar {
			continue
		}
		if _, err := resolve(one.dims, counted, 0); err != nil || one.dims == nil {
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
		shape, err := resolve(one.dims, sizes, 0)
		if err == nil {
			made[one.name], err = fill(one.dtype, shape, nil)
		}
		if err != nil {
			release(made)
			return nil, fmt.Errorf("output %q: %w", one.name, err)
		}
	}
	return made, nil
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
			return fmt.Errorf("there is no value for input %q", name)
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
