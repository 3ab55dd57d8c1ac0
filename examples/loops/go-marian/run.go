package main

import (
	"errors"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"decode/decoder"
)

// run is what is decoded: given on the command line, or in a line of a probe file.
type run struct {
	prompts [][]int64
	source  [][]int64
	follow  [][]int64 // what each sequence continues with; empty where the model chooses
	tests   []string
}

// define adds the options of a run to those of a command line.
func (r *run) define(flags *flag.FlagSet) {
	flags.Func("prompt", "`ids` with commas; once a sequence", rows(&r.prompts))
	flags.Func("source", "`ids` for the encoder, with commas; once a sequence", rows(&r.source))
	flags.Func("follow", "continue with these `ids` whatever is likeliest; once a sequence", rows(&r.follow))
	flags.Func("self-test", "with --follow: also rewind,reorder, and compare", func(text string) error {
		r.tests = strings.Split(text, ",")
		for _, name := range r.tests {
			if name != "rewind" && name != "reorder" {
				return fmt.Errorf("it knows rewind and reorder, not %q", name)
			}
		}
		return nil
	})
}

// check refuses a run that lacks something.
func (r *run) check() error {
	switch {
	case len(r.prompts) == 0:
		return errors.New("--prompt is missing")
	case len(r.source) == 0:
		return errors.New("--source is missing")
	case len(r.tests) > 0 && (len(r.follow) == 0 || len(r.follow[0]) == 0):
		return errors.New("--self-test needs tokens to --follow")
	}
	for _, tokens := range r.follow {
		if len(r.follow) != len(r.prompts) || len(tokens) != len(r.follow[0]) {
			return errors.New("--follow is given once for each prompt, always with as many ids")
		}
	}
	return nil
}

// encode gives the decoder what the sequences are about. Shorter sources are padded on the right, which the mask says.
func (r *run) encode(d *decoder.Decoder) error {
	longest := 0
	for _, source := range r.source {
		longest = max(longest, len(source))
	}
	padded, mask := make([][]int64, len(r.source)), make([][]int64, len(r.source))
	for i, source := range r.source {
		padded[i], mask[i] = make([]int64, longest), make([]int64, longest)
		copy(padded[i], source)
		for j := range source {
			mask[i][j] = 1
		}
	}
	return d.Encode(padded, mask)
}

// decode gives the likeliest token after the prompt and after each given one, whatever was likeliest before.
// Then come the self-tests.
func (r *run) decode(d *decoder.Decoder, onStep func()) ([][]int64, error) {
	made := make([][]int64, len(r.prompts))
	note := func(logits [][]float32) {
		for i := range made {
			made[i] = append(made[i], decoder.Likeliest(logits[i]))
		}
		onStep()
	}
	logits, err := d.Prefill(r.prompts)
	if err != nil {
		return nil, err
	}
	note(logits)
	for i := range r.steps() {
		if logits, err = d.Step(r.step(i)); err != nil {
			return nil, err
		}
		note(logits)
	}
	if len(r.tests) > 0 {
		if err := r.selfTest(d, made); err != nil {
			return nil, err
		}
	}
	return made, nil
}

// steps is the number of tokens that are followed.
func (r *run) steps() int {
	if len(r.follow) == 0 {
		return 0
	}
	return len(r.follow[0])
}

// step is the token of each sequence in a step.
func (r *run) step(index int) [][]int64 {
	tokens := make([][]int64, len(r.follow))
	for i, row := range r.follow {
		tokens[i] = row[index : index+1]
	}
	return tokens
}

// selfTest takes the last step again after going back, and after changing rows: the likeliest tokens must be the same.
func (r *run) selfTest(d *decoder.Decoder, made [][]int64) error {
	last, expected := r.step(r.steps()-1), make([]int64, len(made))
	for i, tokens := range made {
		expected[i] = tokens[len(tokens)-1]
	}
	if slices.Contains(r.tests, "rewind") {
		if err := d.Rewind(1); err != nil {
			return err
		}
		if err := compare(d, "rewind", last, expected); err != nil {
			return err
		}
	}
	if slices.Contains(r.tests, "reorder") {
		if err := d.Rewind(1); err != nil {
			return err
		}
		order := []int64{} // the rows backwards, and the first one once more
		for i := len(last) - 1; i >= 0; i-- {
			order = append(order, int64(i))
		}
		order = append(order, 0)
		if err := d.Reorder(order); err != nil {
			return err
		}
		tokens, likeliest := make([][]int64, len(order)), make([]int64, len(order))
		for i, row := range order {
			tokens[i], likeliest[i] = last[row], expected[row]
		}
		return compare(d, "reorder", tokens, likeliest)
	}
	return nil
}

// compare fails where other tokens are likeliest.
func compare(d *decoder.Decoder, name string, tokens [][]int64, expected []int64) error {
	logits, err := d.Step(tokens)
	if err != nil {
		return err
	}
	got := make([]int64, len(logits))
	for i := range logits {
		got[i] = decoder.Likeliest(logits[i])
	}
	if !slices.Equal(got, expected) {
		return fmt.Errorf("%s: %v in place of %v", name, got, expected)
	}
	return nil
}

// row reads integers with commas between them.
func row(to *[]int64) func(string) error {
	return func(text string) error {
		*to = nil
		for _, part := range strings.Split(text, ",") {
			if part == "" {
				continue
			}
			number, err := strconv.ParseInt(strings.TrimSpace(part), 10, 64)
			if err != nil {
				return fmt.Errorf("%q is no integer", part)
			}
			*to = append(*to, number)
		}
		return nil
	}
}

// rows reads one row each time that the option is given.
func rows(to *[][]int64) func(string) error {
	return func(text string) error {
		var numbers []int64
		err := row(&numbers)(text)
		*to = append(*to, numbers)
		return err
	}
}
