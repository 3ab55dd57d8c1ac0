// Command decode makes calls of a decoder: token ids in, token ids out. `decode --help` lists the options.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"

	ort "github.com/yalue/onnxruntime_go"

	"decodeloop"
)

const cpu = "CPUExecutionProvider"

var (
	model    = flag.String("model", "", "`folder` of the model files")
	contract = flag.String("contract", "contract.json", "`file` with the contract of the model")
	provider = flag.String("provider", cpu, "`name` of the execution provider")
	calls    = flag.String("calls", "", "calls as `JSON`: [{\"call\": \"generate\", \"rows\": [[5, 6, 7]], \"most\": 20}]")
	runs     = flag.String("runs", "vectors.json", "`file` of runs to play where there are no --calls")
	record   = flag.String("record", "", "`file` to write what was fed and returned, a trace")
)

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := execute(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		stop()
		os.Exit(1)
	}
}

// execute makes the calls, whose tokens go to standard output, a line for each sequence; or it plays the runs.
func execute(ctx context.Context) error {
	if *model == "" || flag.NArg() > 0 {
		return fmt.Errorf("give the --model; unexpected: %q", flag.Args())
	}
	d, err := open()
	if err != nil {
		return err
	}
	defer d.Close()
	lines := io.Discard
	if *record != "" {
		file, err := os.Create(*record)
		if err != nil {
			return err
		}
		defer file.Close()
		lines = file
	}
	if *calls == "" {
		return play(ctx, d, *runs, lines)
	}
	d.Trace(lines, "")
	var all []call
	given := json.NewDecoder(strings.NewReader(*calls))
	given.DisallowUnknownFields()
	if err := given.Decode(&all); err != nil || given.More() {
		return fmt.Errorf("--calls is not one list of calls: %v", err)
	}
	for _, one := range all {
		made, err := one.make(ctx, d, "")
		if err != nil {
			return err
		}
		for _, tokens := range made {
			fmt.Println(strings.Trim(strings.ReplaceAll(fmt.Sprint(tokens), " ", ","), "[]"))
		}
	}
	return nil
}

func open() (*decodeloop.Decoder, error) {
	contract, err := decodeloop.ReadContract(*contract)
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
	if err := addProvider(session); err != nil {
		return nil, fmt.Errorf("this ONNX Runtime has no provider %q (%s is always there): %w", *provider, cpu, err)
	}
	return decodeloop.Open(*model, contract, decodeloop.Options{Session: session})
}

// addProvider adds the chosen one by its name; the runtime has functions of their own for two.
func addProvider(options *ort.SessionOptions) error {
	switch *provider {
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
	}
	return options.AppendExecutionProvider(*provider, nil)
}
