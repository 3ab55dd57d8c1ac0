package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"decodeloop"
)

const runsSchema = "kvdoctor/loop-vectors/2"

// anyToken stands for a token that is not compared.
const anyToken = -1

// call is a call of the decoder, with the likeliest tokens that it must return.
type call struct {
	Call, File                 string
	Rows                       [][]int64
	Shape, Order, Expect, Stop []int64
	Count                      int64
	Most                       int
	decodeloop.Sampling
}

// make makes the call, with files of a folder; the tokens of each sequence that it generates, or the likeliest one.
func (c *call) make(ctx context.Context, d *decodeloop.Decoder, folder string) ([][]int64, error) {
	switch c.Call {
	case "encode":
		return nil, d.Encode(ctx, c.Rows)
	case "encode-file": // float32, little endian
		bytes, err := os.ReadFile(filepath.Join(folder, c.File))
		if err != nil {
			return nil, err
		}
		numbers := make([]float32, len(bytes)/4)
		if _, err := binary.Decode(bytes, binary.LittleEndian, numbers); err != nil {
			return nil, err
		}
		return nil, d.EncodeFloats(ctx, numbers, c.Shape, nil)
	case "prefill":
		return likeliest(d.Prefill(ctx, c.Rows))
	case "step":
		return likeliest(d.Step(ctx, c.Rows))
	case "rewind":
		return nil, d.Rewind(c.Count)
	case "reorder":
		return nil, d.Reorder(c.Order)
	case "generate":
		choose, err := c.Sampler()
		if err != nil {
			return nil, err
		}
		return d.Generate(ctx, c.Rows, decodeloop.Generation{Most: c.Most, Stop: c.Stop, Choose: choose})
	}
	return nil, fmt.Errorf("there is no call %q", c.Call)
}

func likeliest(logits decodeloop.Logits, err error) ([][]int64, error) {
	tokens := make([][]int64, len(logits))
	for row := range tokens {
		tokens[row] = []int64{decodeloop.Likeliest(logits.Last(row))}
	}
	return tokens, err
}

// follow makes calls in order: the likeliest tokens after each that has expected ones, and the first that differ.
func follow(ctx context.Context, d *decodeloop.Decoder, calls []call, folder string) ([][]int64, string, error) {
	d.Reset()
	tokens, differs := [][]int64{}, ""
	for _, one := range calls {
		made, err := one.make(ctx, d, folder)
		if err != nil {
			return tokens, differs, err
		}
		if one.Expect == nil {
			continue
		}
		found := slices.Concat(made...)
		fits := func(token, due int64) bool { return due == anyToken || token == due }
		if differs == "" && !slices.EqualFunc(found, one.Expect, fits) {
			differs = fmt.Sprintf("step %d: %v in place of %v", len(tokens), found, one.Expect)
		}
		tokens = append(tokens, found)
	}
	return tokens, differs, nil
}

// play decodes each run of a file, and writes its calls and its tokens. It fails where some tokens are other ones.
func play(ctx context.Context, d *decodeloop.Decoder, path string, lines io.Writer) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var vectors struct {
		Schema string
		Runs   []struct {
			Name  string
			Calls []call
		}
	}
	if err := json.Unmarshal(text, &vectors); err != nil || vectors.Schema != runsSchema {
		return fmt.Errorf("%s has no runs of the schema %q: %v", path, runsSchema, err)
	}
	fmt.Fprintln(lines, strings.ReplaceAll(strings.TrimSpace(string(text)), "\n", " ")) // the runs that are due
	wrong := 0
	for _, one := range vectors.Runs {
		d.Trace(lines, one.Name)
		tokens, differs, failure := follow(ctx, d, one.Calls, filepath.Dir(path))
		ended, outcome := map[string]any{"run": one.Name, "tokens": tokens, "error": nil}, differs
		if failure != nil {
			ended["error"], outcome = failure.Error(), fmt.Sprint("error: ", failure)
		}
		if outcome != "" {
			wrong++
		} else {
			outcome = "as expected"
		}
		if err := json.NewEncoder(lines).Encode(ended); err != nil {
			return err
		}
		fmt.Printf("%s: %s\n", one.Name, outcome)
	}
	if wrong > 0 {
		return fmt.Errorf("%d of %d runs are not as expected", wrong, len(vectors.Runs))
	}
	return nil
}
