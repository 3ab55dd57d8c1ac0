package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"decodeloop"
)

const runsSchema = "kvdoctor/loop-vectors/1"

// anyToken stands for a token that is not compared.
const anyToken = -1

// run is what is decoded: given on the command line, or a run of vectors.json.
type run struct {
	Name     string
	Prompts  [][]int64
	Source   source
	Follow   [][]int64 // what each sequence continues with; empty where the model chooses
	Expect   [][]int64 // the likeliest token after the prompt and after each followed token
	SelfTest string    `json:"self_test"`
}

// source is what the sequences are about: ids, or a file of numbers (float32, little endian) with its shape.
type source struct {
	ids   [][]int64
	File  string
	Shape []int64
}

// UnmarshalJSON reads a list of ids, an object or null.
func (s *source) UnmarshalJSON(text []byte) error {
	if len(text) > 0 && text[0] == '[' {
		return json.Unmarshal(text, &s.ids)
	}
	type plain source
	return json.Unmarshal(text, (*plain)(s))
}

// define adds the options of a run to those of a command line.
func (r *run) define(flags *flag.FlagSet) {
	flags.Func("prompt", "`ids` with commas; once a sequence", rows(&r.Prompts))
	flags.Func("source", "`ids` for the encoder, with commas, once a sequence; or the file of its input: float32, "+
		"little endian", func(text string) error {
		if r.Source.File = text; strings.Trim(text, "0123456789, ") == "" {
			r.Source.File = ""
			return rows(&r.Source.ids)(text)
		}
		return nil
	})
	flags.Func("source-shape", "the `shape` of the file, with commas", row(&r.Source.Shape))
	flags.Func("follow", "continue with these `ids` whatever is likeliest; once a sequence", rows(&r.Follow))
	flags.Func("self-test", "with --follow: then also rewind,reorder, and compare", func(text string) error {
		for _, name := range strings.Split(text, ",") {
			if name != "rewind" && name != "reorder" {
				return fmt.Errorf("it takes rewind and reorder, not %q", name)
			}
		}
		r.SelfTest = text
		return nil
	})
}

// check refuses a run that lacks something.
func (r *run) check() error {
	switch {
	case len(r.Prompts) == 0:
		return errors.New("--prompt is missing")
	case r.Source.File != "" && len(r.Source.Shape) == 0:
		return errors.New("--source-shape is missing")
	case r.SelfTest != "" && r.steps() == 0:
		return errors.New("--self-test needs tokens to --follow")
	}
	for _, tokens := range r.Follow {
		if len(r.Follow) != len(r.Prompts) || len(tokens) != len(r.Follow[0]) {
			return errors.New("--follow is given once for each prompt, always with as many ids")
		}
	}
	return nil
}

// play decodes each run of a file, and writes its calls and its tokens. It fails where some tokens are other ones.
func (given *options) play(ctx context.Context, d *decodeloop.Decoder) error {
	path := found(given.runs, "vectors.json")
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var vectors struct {
		Schema string
		Runs   []run
	}
	if err := json.Unmarshal(text, &vectors); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if vectors.Schema != runsSchema {
		return fmt.Errorf("%s has the schema %q, and this program reads %q", path, vectors.Schema, runsSchema)
	}
	record := os.DevNull
	if given.record != "" {
		record = given.record
	}
	runs, _ := os.Stat(path)
	if there, err := os.Stat(record); err == nil && os.SameFile(runs, there) {
		return errors.New("--record is the file of --runs itself")
	}
	file, err := os.Create(record)
	if err != nil {
		return err
	}
	// The first line of a record is the runs that are due.
	if _, err := fmt.Fprintln(file, strings.ReplaceAll(strings.TrimSpace(string(text)), "\n", " ")); err != nil {
		return errors.Join(err, file.Close())
	}
	wrong := 0
	for _, one := range vectors.Runs {
		if one.Source.File != "" && !filepath.IsAbs(one.Source.File) {
			one.Source.File = filepath.Join(filepath.Dir(path), one.Source.File)
		}
		d.Trace(file, one.Name)
		tokens, problem := one.play(ctx, d)
		line := map[string]any{"run": one.Name, "tokens": tokens, "error": nil}
		if problem == "" {
			problem = one.difference(tokens)
		} else {
			line["error"] = strings.TrimPrefix(problem, "error: ")
		}
		if err := json.NewEncoder(file).Encode(line); err != nil {
			return errors.Join(err, file.Close())
		}
		if problem == "" {
			problem = "as expected"
		} else {
			wrong++
		}
		fmt.Printf("%s: %s\n", one.Name, problem)
	}
	if err := file.Close(); err != nil {
		return err
	}
	if wrong > 0 || len(vectors.Runs) == 0 {
		return fmt.Errorf("%d of %d runs are not as expected", wrong, len(vectors.Runs))
	}
	return nil
}

// play decodes a run from the beginning; the problem is empty where that was possible.
func (r *run) play(ctx context.Context, d *decodeloop.Decoder) (tokens [][]int64, problem string) {
	d.Reset()
	err := r.check()
	if err == nil {
		err = r.encode(ctx, d)
	}
	if err == nil {
		tokens, err = r.decode(ctx, d, func() {})
	}
	if err != nil {
		return [][]int64{}, "error: " + err.Error()
	}
	return tokens, ""
}

// difference is the first token that is not the expected one, in words; empty where all are.
func (r *run) difference(made [][]int64) string {
	for i, tokens := range r.Expect {
		if i >= len(made) || len(made[i]) != len(tokens) {
			return fmt.Sprintf("sequence %d: it does not have the %d expected tokens", i, len(tokens))
		}
		for step, expected := range tokens {
			if got := made[i][step]; expected != anyToken && got != expected {
				return fmt.Sprintf("sequence %d, step %d: token %d in place of %d", i, step, got, expected)
			}
		}
	}
	return ""
}

// encode gives the decoder what the sequences are about. Shorter texts are padded on the right, which a mask says.
func (r *run) encode(ctx context.Context, d *decodeloop.Decoder) error {
	if r.Source.File != "" {
		numbers, err := floats(r.Source.File)
		if err != nil {
			return err
		}
		return d.EncodeFloats(ctx, numbers, r.Source.Shape, nil)
	}
	if len(r.Source.ids) == 0 {
		return nil
	}
	longest, unequal := 0, false
	for _, ids := range r.Source.ids {
		unequal = unequal || len(ids) != len(r.Source.ids[0])
		longest = max(longest, len(ids))
	}
	if !unequal {
		return d.Encode(ctx, r.Source.ids, nil)
	}
	padded, mask := make([][]int64, len(r.Source.ids)), make([][]int64, len(r.Source.ids))
	for i, ids := range r.Source.ids {
		padded[i], mask[i] = make([]int64, longest), make([]int64, longest)
		copy(padded[i], ids)
		for j := range ids {
			mask[i][j] = 1
		}
	}
	return d.Encode(ctx, padded, mask)
}

func floats(file string) ([]float32, error) {
	bytes, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	if len(bytes)%4 != 0 {
		return nil, fmt.Errorf("%s does not hold numbers of 4 bytes", file)
	}
	numbers := make([]float32, len(bytes)/4)
	for i := range numbers {
		numbers[i] = math.Float32frombits(binary.LittleEndian.Uint32(bytes[4*i:]))
	}
	return numbers, nil
}

// decode gives the likeliest token after the prompt and after each given one, whatever was likeliest before. Then come
// the self-tests.
func (r *run) decode(ctx context.Context, d *decodeloop.Decoder, onStep func()) ([][]int64, error) {
	logits, err := d.Prefill(ctx, r.Prompts)
	if err != nil {
		return nil, err
	}
	onStep()
	made := make([][]int64, len(r.Prompts))
	for i, token := range likeliest(logits) {
		made[i] = append(made[i], token)
	}
	for step := range r.steps() {
		if logits, err = d.Step(ctx, r.step(step)); err != nil {
			return nil, err
		}
		onStep()
		for i, token := range likeliest(logits) {
			made[i] = append(made[i], token)
		}
	}
	if r.SelfTest != "" {
		return made, r.selfTest(ctx, d, likeliest(logits))
	}
	return made, nil
}

func likeliest(logits decodeloop.Logits) []int64 {
	tokens := make([]int64, len(logits))
	for i := range logits {
		tokens[i] = decodeloop.Likeliest(logits.Last(i))
	}
	return tokens
}

// steps is the number of tokens that are followed.
func (r *run) steps() int {
	if len(r.Follow) == 0 {
		return 0
	}
	return len(r.Follow[0])
}

// step is the token of each sequence in a step.
func (r *run) step(index int) [][]int64 {
	tokens := make([][]int64, len(r.Follow))
	for i, row := range r.Follow {
		tokens[i] = row[index : index+1]
	}
	return tokens
}

// selfTest takes the last step again after going back, and after changing rows: the likeliest tokens must be the same.
func (r *run) selfTest(ctx context.Context, d *decodeloop.Decoder, expected []int64) error {
	last, tests := r.step(r.steps()-1), strings.Split(r.SelfTest, ",")
	if slices.Contains(tests, "rewind") {
		if err := d.Rewind(1); err != nil {
			return err
		}
		if err := compare(ctx, d, "rewind", last, expected); err != nil {
			return err
		}
	}
	if !slices.Contains(tests, "reorder") {
		return nil
	}
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
	tokens, wanted := make([][]int64, len(order)), make([]int64, len(order))
	for i, row := range order {
		tokens[i], wanted[i] = last[row], expected[row]
	}
	return compare(ctx, d, "reorder", tokens, wanted)
}

// compare fails where other tokens are likeliest.
func compare(ctx context.Context, d *decodeloop.Decoder, name string, tokens [][]int64, expected []int64) error {
	logits, err := d.Step(ctx, tokens)
	if err != nil {
		return err
	}
	if got := likeliest(logits); !slices.Equal(got, expected) {
		return fmt.Errorf("%s: %v in place of %v", name, got, expected)
	}
	return nil
}

// row reads integers with commas between them.
func row(to *[]int64) func(string) error {
	return func(text string) error {
		*to = []int64{}
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
