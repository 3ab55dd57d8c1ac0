// Command decode continues sequences of token ids. `decode --help` lists the options.
package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	ort "github.com/yalue/onnxruntime_go"

	"decode/decoder"
)

// options are those of the command line.
type options struct {
	model       string
	provider    string
	run         run
	most        int
	stop        []int64
	temperature float64
	topK        int
	seed        uint64
	probe       string
	result      string
}

func main() {
	var given options
	flag.StringVar(&given.model, "model", "", "`folder` of the model files")
	flag.StringVar(&given.provider, "provider", cpu, "`name` of the execution provider")
	given.run.define(flag.CommandLine)
	flag.IntVar(&given.most, "most", 20, "the most new tokens")
	flag.Func("stop", "`ids` that end a sequence, with commas", row(&given.stop))
	flag.Float64Var(&given.temperature, "temperature", 0, "0 takes the likeliest token, otherwise sampled")
	flag.IntVar(&given.topK, "top-k", 50, "sample from so many tokens")
	flag.Uint64Var(&given.seed, "seed", 0, "of the sampling")
	flag.StringVar(&given.probe, "probe", "", "decode the runs in this `file`, and compare their tokens")
	flag.StringVar(&given.result, "result", "result.jsonl", "with --probe: the `file` where calls and tokens are written")
	flag.Parse()
	if err := given.execute(); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func (given *options) execute() error {
	if err := given.check(); err != nil {
		return err
	}
	if given.probe != "" {
		return given.runProbe()
	}
	return given.decode()
}

func (given *options) check() error {
	switch {
	case flag.NArg() > 0:
		return fmt.Errorf("unexpected argument %q", flag.Arg(0))
	case given.model == "":
		return errors.New("--model is missing")
	case given.most < 1 || given.topK < 1:
		return errors.New("--most and --top-k are at least 1")
	case !(given.temperature >= 0): // NaN as well
		return errors.New("--temperature is 0 or more")
	case given.probe == "":
		return given.run.check()
	case len(given.run.prompts) > 0:
		return errors.New("--probe takes its prompts from the file")
	}
	return nil
}

// open opens the model.
func (given *options) open() (*decoder.Decoder, error) {
	sessions, err := sessionOptions(given.provider)
	if err != nil {
		return nil, err
	}
	defer sessions.Destroy()
	return decoder.Open(given.model, sessions)
}

// runProbe decodes the runs of a probe file; it fails where some tokens are not the expected ones.
func (given *options) runProbe() error {
	runs, err := readProbe(given.probe)
	if err != nil {
		return err
	}
	if same(given.probe, given.result) {
		return errors.New("--result is the file of --probe itself")
	}
	// Emptied before the model is opened: nothing of an earlier probe remains where that fails.
	if err := os.WriteFile(given.result, nil, 0o644); err != nil {
		return err
	}
	d, err := given.open()
	if err != nil {
		return err
	}
	defer d.Close()
	asExpected, err := probe(d, runs, given.result)
	if err == nil && !asExpected {
		err = errors.New("not all tokens are the expected ones")
	}
	return err
}

// same tells whether two paths are those of one file.
func same(one, other string) bool {
	first, err := os.Stat(one)
	if err != nil {
		return false
	}
	second, err := os.Stat(other)
	return err == nil && os.SameFile(first, second)
}

// decode decodes: tokens go to standard output, a line for each sequence, measurements to standard error.
func (given *options) decode() error {
	d, err := given.open()
	if err != nil {
		return err
	}
	defer d.Close()
	began := time.Now()
	if err := given.run.encode(d); err != nil {
		return err
	}
	var made [][]int64
	var times []time.Time
	if len(given.run.follow) > 0 {
		made, err = given.run.decode(d, func() { times = append(times, time.Now()) })
	} else {
		how := decoder.Options{Most: given.most, Stop: given.stop}
		how.OnToken = func(int, int64) { times = append(times, time.Now()) }
		if given.temperature > 0 {
			how.Choose = sampler(given.temperature, given.topK, given.seed)
		}
		made, err = d.Generate(given.run.prompts, how)
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
		fmt.Fprintf(os.Stderr, "first token %.1f ms, %.1f tokens/s%s\n", first, rate, peakMemory())
	}
	return nil
}

const cpu = "CPUExecutionProvider"

// byName are the execution providers that the runtime adds by their names.
var byName = []string{
	"AzureExecutionProvider",
	"QNNExecutionProvider",
	"VitisAIExecutionProvider",
	"WebGpuExecutionProvider",
	"XnnpackExecutionProvider",
}

// byFunction are those that the binding adds by functions of their own.
var byFunction = map[string]func(*ort.SessionOptions) error{
	"CUDAExecutionProvider":     addCUDA,
	"TensorrtExecutionProvider": addTensorRT,
	"CoreMLExecutionProvider":   func(o *ort.SessionOptions) error { return o.AppendExecutionProviderCoreMLV2(nil) },
	"DmlExecutionProvider":      func(o *ort.SessionOptions) error { return o.AppendExecutionProviderDirectML(0) },
	"OpenVINOExecutionProvider": func(o *ort.SessionOptions) error { return o.AppendExecutionProviderOpenVINO(nil) },
}

// sessionOptions chooses an execution provider. Most need a build of ONNX Runtime that has them.
func sessionOptions(provider string) (*ort.SessionOptions, error) {
	add, known := byFunction[provider]
	if slices.Contains(byName, provider) {
		add = func(o *ort.SessionOptions) error { return o.AppendExecutionProvider(provider, nil) }
	} else if !known && provider != cpu {
		names := append([]string{cpu}, byName...)
		for name := range byFunction {
			names = append(names, name)
		}
		slices.Sort(names)
		return nil, fmt.Errorf("there is no provider %q, but %s", provider, strings.Join(names, ", "))
	}
	if err := decoder.LoadRuntime(); err != nil {
		return nil, err
	}
	options, err := ort.NewSessionOptions()
	if err != nil || add == nil {
		return options, err
	}
	if err := add(options); err != nil {
		options.Destroy()
		return nil, fmt.Errorf("provider %s: %w", provider, err)
	}
	return options, nil
}

func addCUDA(options *ort.SessionOptions) error {
	cuda, err := ort.NewCUDAProviderOptions()
	if err != nil {
		return err
	}
	defer cuda.Destroy()
	return options.AppendExecutionProviderCUDA(cuda)
}

func addTensorRT(options *ort.SessionOptions) error {
	tensorRT, err := ort.NewTensorRTProviderOptions()
	if err != nil {
		return err
	}
	defer tensorRT.Destroy()
	return options.AppendExecutionProviderTensorRT(tensorRT)
}

func join(tokens []int64) string {
	texts := make([]string, len(tokens))
	for i, token := range tokens {
		texts[i] = strconv.FormatInt(token, 10)
	}
	return strings.Join(texts, ",")
}

// sampler picks from the topK likeliest tokens, by their probabilities at a temperature.
func sampler(temperature float64, topK int, seed uint64) func([]float32) int64 {
	random := rand.New(rand.NewPCG(seed, 0))
	return func(logits []float32) int64 {
		tokens := make([]int, len(logits))
		for i := range tokens {
			tokens[i] = i
		}
		slices.SortFunc(tokens, func(a, b int) int { return cmp.Compare(logits[b], logits[a]) })
		tokens = tokens[:min(topK, len(tokens))]
		weights, sum := make([]float64, len(tokens)), 0.0
		for i, token := range tokens {
			weights[i] = math.Exp(float64(logits[token]-logits[tokens[0]]) / temperature)
			sum += weights[i]
		}
		at := random.Float64() * sum
		for i, token := range tokens {
			if at -= weights[i]; at < 0 {
				return int64(token)
			}
		}
		return int64(tokens[0])
	}
}

// peakMemory is ", peak memory N MiB", the largest resident memory of this process so far; empty where it is unknown.
func peakMemory() string {
	status, err := os.ReadFile("/proc/self/status") // on Linux
	if err != nil {
		return ""
	}
	for _, line := range strings.Split(string(status), "\n") {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "VmHWM:" {
			kib, _ := strconv.Atoi(fields[1])
			return fmt.Sprintf(", peak memory %d MiB", kib/1024)
		}
	}
	return ""
}
