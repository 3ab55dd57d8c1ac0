package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"decodeloop"
)

const runsSchema = "kvdoctor/loop-vectors/1"

// anyToken stands for a token that is not compared.
const anyToken = -1

// run is a run of vectors.json.
type run struct {
	Name     string
	Prompts  [][]int64
	Source   source
	Follow   [][]int64 // what each sequence continues with
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
	if text[0] == '[' {
		return json.Unmarshal(text, &s.ids)
	}
	type plain source
	return json.Unmarshal(text, (*plain)(s))
}

// encode gives the decoder what the sequences are about; a file is in a folder.
func (s *source) encode(ctx context.Context, d *decodeloop.Decoder, folder string) error {
	if s.File == "" && len(s.ids) == 0 {
		return nil
	}
	if s.File == "" {
		return d.Encode(ctx, s.ids, nil)
	}
	bytes, err := os.ReadFile(filepath.Join(folder, s.File))
	if err != nil {
		return err
	}
	numbers := make([]float32, len(bytes)/4)
	for i := range numbers {
		numbers[i] = math.Float32frombits(binary.LittleEndian.Uint32(bytes[4*i:]))
	}
	return d.EncodeFloats(ctx, numbers, s.Shape, nil)
}

// playAll decodes each run of a file, and records its calls and its tokens. It fails where some tokens are other ones.
func playAll(ctx context.Context, d *decodeloop.Decoder, path, record string) error {
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
	runs, _ := os.Stat(path)
	if there, err := os.Stat(record); err == nil && os.SameFile(runs, there) {
		return errors.New("--record is the file of --runs itself")
	}
	file, err := os.Create(record)
	if err != nil {
		return err
	}
	defer file.Close()
	// The first line of a record is the runs that are due.
	if _, err := fmt.Fprintln(file, strings.ReplaceAll(strings.TrimSpace(string(text)), "\n", " ")); err != nil {
		return err
	}
	wrong := 0
	for _, one := range vectors.Runs {
		d.Reset()
		d.Trace(file, one.Name)
		tokens, failure := one.play(ctx, d, filepath.Dir(path))
		line := map[string]any{"run": one.Name, "tokens": tokens, "error": nil}
		outcome := one.difference(tokens)
		if failure != nil {
			line["error"], line["tokens"], outcome = failure.Error(), [][]int64{}, "error: "+failure.Error()
		}
		if err := json.NewEncoder(file).Encode(line); err != nil {
			return err
		}
		fmt.Printf("%s: %s\n", one.Name, outcome)
		if outcome != asExpected {
			wrong++
		}
	}
	if wrong > 0 || len(vectors.Runs) == 0 {
		return fmt.Errorf("%d of %d runs are not as expected", wrong, len(vectors.Runs))
	}
	return nil
}

// play gives the likeliest token after the prompt and after each given one, whatever was likeliest before. Then the last
// step may be taken again.
func (r *run) play(ctx context.Context, d *decodeloop.Decoder, folder string) ([][]int64, error) {
	if err := r.Source.encode(ctx, d, folder); err != nil {
		return nil, err
	}
	logits, err := d.Prefill(ctx, r.Prompts)
	if err != nil {
		return nil, err
	}
	made, last, steps := make([][]int64, len(r.Prompts)), [][]int64{}, 0
	if len(r.Follow) > 0 {
		steps = len(r.Follow[0])
	}
	for step := 0; ; step++ {
		for row := range made {
			made[row] = append(made[row], decodeloop.Likeliest(logits.Last(row)))
		}
		if step == steps {
			break
		}
		last = make([][]int64, len(r.Follow))
		for row, follow := range r.Follow {
			last[row] = follow[step : step+1]
		}
		if logits, err = d.Step(ctx, last); err != nil {
			return nil, err
		}
	}
	if r.SelfTest != "" {
		return made, r.again(ctx, d, last, made)
	}
	return made, nil
}

// again takes the last step again after going back, and perhaps with the rows backwards and the first one once more: the
// likeliest tokens must be the same.
func (r *run) again(ctx context.Context, d *decodeloop.Decoder, last, made [][]int64) error {
	if err := d.Rewind(1); err != nil {
		return err
	}
	order := make([]int64, len(last))
	for row := range order {
		order[row] = int64(row)
	}
	if r.SelfTest == "reorder" {
		slices.Reverse(order)
		order = append(order, 0)
		if err := d.Reorder(order); err != nil {
			return err
		}
	}
	var tokens [][]int64
	var got, expected []int64
	for _, row := range order {
		tokens, expected = append(tokens, last[row]), append(expected, made[row][len(made[row])-1])
	}
	logits, err := d.Step(ctx, tokens)
	if err != nil {
		return err
	}
	for row := range logits {
		got = append(got, decodeloop.Likeliest(logits.Last(row)))
	}
	if !slices.Equal(got, expected) {
		return fmt.Errorf("%s: %v in place of %v", r.SelfTest, got, expected)
	}
	return nil
}

const asExpected = "as expected"

// difference is the first token that is not the expected one, in a text.
func (r *run) difference(made [][]int64) string {
	for i, tokens := range made {
		for step, got := range tokens {
			if expected := r.Expect[i][step]; expected != anyToken && got != expected {
				return fmt.Sprintf("sequence %d, step %d: token %d in place of %d", i, step, got, expected)
			}
		}
	}
	return asExpected
}
