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
	sources                   []string
	shape                     []int64
	sampling                  decodeloop.Sampling
	how                       decodeloop.Generation
	record, runs              string
}

func main() {
	var given options
	given.define()
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := given.execute(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		stop()
		os.Exit(1)
	}
}

func (given *options) define() {
	sampling := &given.sampling
	flag.StringVar(&given.model, "model", "", "`folder` of the model files")
	flag.StringVar(&given.contract, "contract", nextTo("contract.json"), "`file` with the contract of the model")
	flag.StringVar(&given.provider, "provider", cpu, "`name` of the execution provider")
	flag.IntVar(&given.threads, "threads", 0, "of the sessions; 0 lets the runtime choose")
	flag.Int64Var(&given.capacity, "capacity", 0, "room of the cache in tokens, where it can be chosen")
	flag.Func("prompt", "`ids` with commas; once a sequence", func(text string) error {
		given.prompts = append(given.prompts, nil)
		return row(&given.prompts[len(given.prompts)-1])(text)
	})
	sources := "`ids` for the encoder, once a sequence; or the file of its input: float32, little endian"
	flag.Func("source", sources, func(text string) error {
		given.sources = append(given.sources, text)
		return nil
	})
	flag.Func("source-shape", "the `shape` of the file, with commas", row(&given.shape))
	flag.IntVar(&given.how.Most, "most", 20, "the most new tokens")
	flag.Func("stop", "`ids` that end a sequence, in place of those of the contract", row(&given.how.Stop))
	flag.Float64Var(&sampling.Temperature, "temperature", 0, "0 takes the likeliest token, otherwise sampled")
	flag.IntVar(&sampling.TopK, "top-k", 50, "sample from so many tokens; 0 is all")
	flag.Float64Var(&sampling.TopP, "top-p", 0, "sample from the likeliest tokens of this probability together")
	flag.Float64Var(&sampling.MinP, "min-p", 0, "sample from tokens of this part of the largest probability")
	flag.Float64Var(&sampling.RepetitionPenalty, "repetition-penalty", 1, "of tokens that are there")
	flag.Uint64Var(&sampling.Seed, "seed", 0, "of the sampling")
	flag.StringVar(&given.record, "record", "", "play the runs, and write their calls into this `file`")
	flag.StringVar(&given.runs, "runs", nextTo("vectors.json"), "`file` of runs to play")
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
	if err := given.encode(ctx, d); err != nil {
		return err
	}
	made, err := d.Generate(ctx, given.prompts, given.how)
	for _, tokens := range made {
		fmt.Println(strings.Trim(strings.ReplaceAll(fmt.Sprint(tokens), " ", ","), "[]"))
	}
	return err
}

// encode gives the decoder the source: a file where its shape is given, else ids.
func (given *options) encode(ctx context.Context, d *decodeloop.Decoder) error {
	if len(given.sources) == 0 {
		return nil
	}
	source := call{Call: "encode-file", File: given.sources[0], Shape: given.shape}
	if given.shape == nil {
		source = call{Call: "encode", Rows: make([][]int64, len(given.sources))}
		for i, text := range given.sources {
			if err := row(&source.Rows[i])(text); err != nil {
				return fmt.Errorf("%w; a file needs its --source-shape", err)
			}
		}
	}
	_, err := source.make(ctx, d, "")
	return err
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
		if err == nil {
			defer cuda.Destroy()
			err = options.AppendExecutionProviderCUDA(cuda)
		}
		return err
	case "TensorrtExecutionProvider":
		tensorRT, err := ort.NewTensorRTProviderOptions()
		if err == nil {
			defer tensorRT.Destroy()
			err = options.AppendExecutionProviderTensorRT(tensorRT)
		}
		return err
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
	program, _ := os.Executable()
	path := filepath.Join(filepath.Dir(program), name)
	if _, err := os.Stat(path); err != nil {
		return name
	}
	return path
}

// row reads integers with commas between them.
func row(into *[]int64) func(string) error {
	return func(text string) error {
		*into = []int64{}
		if err := json.Unmarshal([]byte("["+text+"]"), into); err != nil {
			return fmt.Errorf("%q are not integers with commas", text)
		}
		return nil
	}
}
