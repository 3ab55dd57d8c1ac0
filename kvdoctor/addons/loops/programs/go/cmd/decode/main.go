// Command decode continues sequences of token ids. `decode --help` lists the options.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"

	ort "github.com/yalue/onnxruntime_go"

	"decodeloop"
)

// options are those of the command line.
type options struct {
	model, contract, provider string
	capacity                  int64
	threads                   int
	prompts                   [][]int64
	source                    source
	sampling                  decodeloop.Sampling
	how                       decodeloop.Generation
	record, runs              string
}

func main() {
	var given options
	flag.StringVar(&given.model, "model", "", "`folder` of the model files")
	flag.StringVar(&given.contract, "contract", nextTo("contract.json"), "`file` with the contract of the model")
	flag.StringVar(&given.provider, "provider", cpu, "`name` of the execution provider")
	flag.IntVar(&given.threads, "threads", 0, "of the sessions; 0 lets the runtime choose")
	flag.Int64Var(&given.capacity, "capacity", 0, "room of the cache in tokens, where it can be chosen")
	flag.Func("prompt", "`ids` with commas; once a sequence", func(text string) error {
		ids, err := row(text)
		given.prompts = append(given.prompts, ids)
		return err
	})
	flag.Func("source", "`ids` for the encoder, with commas, once a sequence; or the file of its input: float32, "+
		"little endian", func(text string) error {
		if ids, err := row(text); err == nil {
			given.source.ids = append(given.source.ids, ids)
		} else {
			given.source.File = text
		}
		return nil
	})
	flag.Func("source-shape", "the `shape` of the file, with commas", func(text string) (err error) {
		given.source.Shape, err = row(text)
		return err
	})
	flag.IntVar(&given.how.Most, "most", 20, "the most new tokens")
	flag.Func("stop", "`ids` that end a sequence, in place of those of the contract", func(text string) (err error) {
		given.how.Stop, err = row(text)
		return err
	})
	flag.Float64Var(&given.sampling.Temperature, "temperature", 0, "0 takes the likeliest token, otherwise sampled")
	flag.IntVar(&given.sampling.TopK, "top-k", 50, "sample from so many tokens; 0 is all")
	flag.Float64Var(&given.sampling.TopP, "top-p", 0, "sample from the likeliest tokens of this probability together")
	flag.Float64Var(&given.sampling.MinP, "min-p", 0, "sample from tokens of this part of the largest probability")
	flag.Float64Var(&given.sampling.RepetitionPenalty, "repetition-penalty", 1, "of tokens that are there")
	flag.Uint64Var(&given.sampling.Seed, "seed", 0, "of the sampling")
	flag.StringVar(&given.record, "record", "", "play the runs, and write their calls into this `file`")
	flag.StringVar(&given.runs, "runs", nextTo("vectors.json"), "`file` of runs to play")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := given.execute(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		stop()
		os.Exit(1)
	}
}

// execute decodes: tokens go to standard output, a line for each sequence.
func (given *options) execute(ctx context.Context) error {
	switch {
	case flag.NArg() > 0:
		return fmt.Errorf("unexpected argument %q", flag.Arg(0))
	case given.model == "":
		return errors.New("--model is missing")
	case (given.record == "") == (len(given.prompts) == 0):
		return errors.New("give at least one --prompt, or a --record")
	case given.capacity < 0 || given.threads < 0 || given.how.Most < 1:
		return errors.New("--capacity, --threads and --most are at least 1")
	case given.source.File != "" && given.source.Shape == nil:
		return fmt.Errorf("--source-shape of the file %q is missing", given.source.File)
	}
	choose, err := given.sampling.Sampler()
	if err != nil {
		return err
	}
	given.how.Choose = choose
	d, err := given.open()
	if err != nil {
		return err
	}
	defer d.Close()
	if given.record != "" {
		return playAll(ctx, d, given.runs, given.record)
	}
	if err := given.source.encode(ctx, d, ""); err != nil {
		return err
	}
	made, err := d.Generate(ctx, given.prompts, given.how)
	if err != nil {
		return err
	}
	for _, tokens := range made {
		fmt.Println(strings.Trim(strings.ReplaceAll(fmt.Sprint(tokens), " ", ","), "[]"))
	}
	return nil
}

// open opens the model.
func (given *options) open() (*decodeloop.Decoder, error) {
	contract, err := decodeloop.ReadContract(given.contract)
	if err != nil {
		return nil, err
	}
	if err := decodeloop.LoadRuntime(); err != nil {
		return nil, err
	}
	session, err := ort.NewSessionOptions()
	if err != nil {
		return nil, err
	}
	defer session.Destroy()
	if err := session.SetIntraOpNumThreads(given.threads); err != nil {
		return nil, err
	}
	if err := addProvider(session, given.provider); err != nil {
		return nil, fmt.Errorf("this ONNX Runtime has no provider %q (%s is always there): %w", given.provider, cpu, err)
	}
	return decodeloop.Open(given.model, contract, decodeloop.Options{Session: session, Capacity: given.capacity})
}

const cpu = "CPUExecutionProvider"

// addProvider adds one by its own function of the binding, where there is one, or by its name.
func addProvider(options *ort.SessionOptions, provider string) error {
	switch provider {
	case cpu:
		return nil
	case "CUDAExecutionProvider":
		cuda, err := ort.NewCUDAProviderOptions()
		if err != nil {
			return err
		}
		defer cuda.Destroy()
		return options.AppendExecutionProviderCUDA(cuda)
	case "TensorrtExecutionProvider":
		tensorRT, err := ort.NewTensorRTProviderOptions()
		if err != nil {
			return err
		}
		defer tensorRT.Destroy()
		return options.AppendExecutionProviderTensorRT(tensorRT)
	case "CoreMLExecutionProvider":
		return options.AppendExecutionProviderCoreMLV2(nil)
	case "DmlExecutionProvider":
		return options.AppendExecutionProviderDirectML(0)
	case "OpenVINOExecutionProvider":
		return options.AppendExecutionProviderOpenVINO(nil)
	}
	return options.AppendExecutionProvider(provider, nil)
}

// nextTo is the path of a file next to the program, or in the current folder.
func nextTo(name string) string {
	if program, err := os.Executable(); err == nil {
		path := filepath.Join(filepath.Dir(program), name)
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return name
}

// row reads integers with commas between them.
func row(text string) ([]int64, error) {
	numbers := []int64{}
	if err := json.Unmarshal([]byte("["+text+"]"), &numbers); err != nil {
		return nil, fmt.Errorf("%q are not integers with commas", text)
	}
	return numbers, nil
}
