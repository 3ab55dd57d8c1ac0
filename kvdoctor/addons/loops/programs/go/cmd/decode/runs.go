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

const runsSchema = "kvdoctor/loop-vectors/2"

// anyToken stands for a token that is not compared.
const anyToken = -1

// vectors is what vectors.json has.
type vectors struct {
	Schema string
	Runs   []struct {
		Name  string
		Calls []call
	}
}

// call is a call of the decoder, with the likeliest tokens that it must return.
type call struct {
	Call, File           string
	Rows                 [][]int64
	Shape, Order, Expect []int64
	Count                int64
}

// make makes the call; files are in a folder.
func (c *call) make(ctx context.Context, d *decodeloop.Decoder, folder string) (decodeloop.Logits, error) {
	switch c.Call {
	case "encode":
		return nil, d.Encode(ctx, c.Rows, nil)
	case "encode-file": // float32, little endian
		bytes, err := os.ReadFile(filepath.Join(folder, c.File))
		if err != nil {
			return nil, err
		}
		numbers := make([]float32, len(bytes)/4)
		for i := range numbers {
			numbers[i] = math.Float32frombits(binary.LittleEndian.Uint32(bytes[4*i:]))
		}
		return nil, d.EncodeFloats(ctx, numbers, c.Shape, nil)
	case "prefill":
		return d.Prefill(ctx, c.Rows)
	case "step":
		return d.Step(ctx, c.Rows)
	case "rewind":
		return nil, d.Rewind(c.Count)
	case "reorder":
		return nil, d.Reorder(c.Order)
	}
	return nil, fmt.Errorf("there is no call %q", c.Call)
}

// play makes calls in order: the likeliest tokens after each that returns logits, and the first that differ from the
// expected ones.
func play(ctx context.Context, d *decodeloop.Decoder, calls []call, folder string) ([][]int64, error, error) {
	d.Reset()
	tokens, differs := [][]int64{}, error(nil)
	for _, one := range calls {
		logits, err := one.make(ctx, d, folder)
		if err != nil {
			return tokens, nil, err
		}
		if logits == nil {
			continue
		}
		found := make([]int64, len(logits))
		for row := range found {
			found[row] = decodeloop.Likeliest(logits.Last(row))
		}
		fits := func(token, due int64) bool { return due == anyToken || token == due }
		if differs == nil && !slices.EqualFunc(found, one.Expect, fits) {
			differs = fmt.Errorf("step %d: %v in place of %v", len(tokens), found, one.Expect)
		}
		tokens = append(tokens, found)
	}
	return tokens, differs, nil
}

// playAll decodes each run of a file, and records its calls and its tokens. It fails where some tokens are other ones.
func playAll(ctx context.Context, d *decodeloop.Decoder, path, record string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var all vectors
	if err := json.Unmarshal(text, &all); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if all.Schema != runsSchema {
		return fmt.Errorf("%s has the schema %q, and this program reads %q", path, all.Schema, runsSchema)
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
	for _, one := range all.Runs {
		d.Trace(file, one.Name)
		tokens, differs, failure := play(ctx, d, one.Calls, filepath.Dir(path))
		line, outcome := map[string]any{"run": one.Name, "tokens": tokens, "error": nil}, "as expected"
		if failure != nil {
			line["error"], differs = failure.Error(), fmt.Errorf("error: %w", failure)
		}
		if differs != nil {
			outcome = differs.Error()
			wrong++
		}
		if err := json.NewEncoder(file).Encode(line); err != nil {
			return err
		}
		fmt.Printf("%s: %s\n", one.Name, outcome)
	}
	if wrong > 0 || len(all.Runs) == 0 {
		return fmt.Errorf("%d of %d runs are not as expected", wrong, len(all.Runs))
	}
	return nil
}
