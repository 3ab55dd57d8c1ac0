// Command decode continues sequences of token ids. `decode --help` lists the options.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	ort "github.com/yalue/onnxruntime_go"

	"decodeloop"
)

// options are those of the command line.
type options struct {
	model, contract, provider string
	capacity                  int64
	threads                   int
	run                       run
	sampling                  decodeloop.Sampling
	how                       decodeloop.Generation
	record, runs              string
}

func main() {
	var given options
	flag.StringVar(&given.model, "model", "", "`folder` of the model files")
	flag.StringVar(&given.contract, "contract", "", "contract.json of the model; without it the `file` next to the program")
	flag.StringVar(&given.provider, "provider", cpu, "`name` of the execution provider")
	flag.IntVar(&given.threads, "threads", 0, "of the sessions; 0 lets the runtime choose")
	flag.Int64Var(&given.capacity, "capacity", 0, "room of the cache in tokens, where it can be chosen")
	given.run.define(flag.CommandLine)
	flag.IntVar(&given.how.Most, "most", 20, "the most new tokens")
	flag.Func("stop", "`ids` that end a sequence, with commas, in place of those of the contract", row(&given.how.Stop))
	flag.Float64Var(&given.sampling.Temperature, "temperature", 0, "0 takes the likeliest token, otherwise sampled")
	flag.IntVar(&given.sampling.TopK, "top-k", 50, "sample from so many tokens; 0 is all")
	flag.Float64Var(&given.sampling.TopP, "top-p", 0, "sample from the likeliest tokens of this probability together")
	flag.Float64Var(&given.sampling.MinP, "min-p", 0, "sample from tokens of this part of the largest probability")
	flag.Float64Var(&given.sampling.RepetitionPenalty, "repetition-penalty", 1, "of tokens that are there")
	flag.Uint64Var(&given.sampling.Seed, "seed", 0, "of the sampling")
	flag.StringVar(&given.record, "record", "", "write the calls into this `file`; without --prompt those of --runs")
	flag.StringVar(&given.runs, "runs", "", "`file` of runs to play and compare; without it vectors.json next to the program")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := given.execute(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		stop()
		os.Exit(1)
	}
}

func (given *options) execute(ctx context.Context) error {
	if err := given.check(); err != nil {
		return err
	}
	d, err := given.open()
	if err != nil {
		return err
	}
	defer d.Close()
	if given.plays() {
		return given.play(ctx, d)
	}
	if given.record != "" {
		file, err := os.Create(given.record)
		if err != nil {
			return err
		}
		defer file.Close()
		d.Trace(file, "")
	}
	return given.decode(ctx, d)
}

func (given *options) plays() bool {
	return given.runs != "" || given.record != "" && len(given.run.Prompts) == 0
}

func (given *options) check() error {
	switch {
	case flag.NArg() > 0:
		return fmt.Errorf("unexpected argument %q", flag.Arg(0))
	case given.model == "":
		return errors.New("--model is missing")
	case given.capacity < 0 || given.threads < 0:
		return errors.New("--capacity and --threads are at least 1")
	case given.how.Most < 1:
		return errors.New("--most is at least 1")
	case !given.plays():
		return given.run.check()
	case len(given.run.Prompts) > 0:
		return errors.New("--runs takes its prompts from the file")
	}
	return nil
}

// open opens the model.
func (given *options) open() (*decodeloop.Decoder, error) {
	contract, err := decodeloop.ReadContract(found(given.contract, "contract.json"))
	if err != nil {
		return nil, err
	}
	session, err := sessionOptions(given.provider, given.threads)
	if err != nil {
		return nil, err
	}
	defer session.Destroy()
	return decodeloop.Open(given.model, contract, decodeloop.Options{Session: session, Capacity: given.capacity})
}

// found is a given path, or that of a file next to the program, or in the current folder.
func found(given, name string) string {
	if given != "" {
		return given
	}
	if program, err := os.Executable(); err == nil {
		path := filepath.Join(filepath.Dir(program), name)
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return name
}

// decode decodes: tokens go to standard output, a line for each sequence, measurements to standard error.
func (given *options) decode(ctx context.Context, d *decodeloop.Decoder) error {
	began := time.Now()
	if err := given.run.encode(ctx, d); err != nil {
		return err
	}
	made, times := make([][]int64, len(given.run.Prompts)), []time.Time{}
	var err error
	if len(given.run.Follow) > 0 {
		made, err = given.run.decode(ctx, d, func() { times = append(times, time.Now()) })
	} else {
		if given.how.Choose, err = given.sampling.Sampler(); err != nil {
			return err
		}
		for token, failure := range d.Tokens(ctx, given.run.Prompts, given.how) {
			if err = failure; err == nil {
				times = append(times, time.Now())
				made[token.Sequence] = append(made[token.Sequence], token.ID)
			}
		}
	}
	if err != nil {
		return err
	}
	for _, tokens := range made {
		fmt.Println(join(tokens))
	}
	if len(times) > 0 {
		rate := 0.0
		if lasted := times[len(times)-1].Sub(times[0]).Seconds(); lasted > 0 {
			rate = float64(len(times)-1) / lasted
		}
		first := times[0].Sub(began).Seconds() * 1000
		fmt.Fprintf(os.Stderr, "first token %.1f ms, %.1f tokens/s\n", first, rate)
	}
	return nil
}

const cpu = "CPUExecutionProvider"

// sessionOptions chooses an execution provider. Most need a build of ONNX Runtime that has them.
func sessionOptions(provider string, threads int) (*ort.SessionOptions, error) {
	if err := decodeloop.LoadRuntime(); err != nil {
		return nil, err
	}
	options, err := ort.NewSessionOptions()
	if err != nil {
		return nil, err
	}
	if err := options.SetIntraOpNumThreads(threads); err != nil {
		options.Destroy()
		return nil, err
	}
	if err := addProvider(options, provider); err != nil {
		options.Destroy()
		return nil, fmt.Errorf("this ONNX Runtime has no provider %q (%s is always there): %w", provider, cpu, err)
	}
	return options, nil
}

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

func join(tokens []int64) string {
	texts := make([]string, len(tokens))
	for i, token := range tokens {
		texts[i] = strconv.FormatInt(token, 10)
	}
	return strings.Join(texts, ",")
}
