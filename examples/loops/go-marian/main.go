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

	"decode/decoder"
)

// options are those of the command line.
type options struct {
	model       string
	prompts     [][]int64
	source      [][]int64
	most        int
	stop        []int64
	follow      [][]int64
	temperature float64
	topK        int
	seed        uint64
	selfTest    string
}

func main() {
	var given options
	flag.StringVar(&given.model, "model", "", "`folder` of the model files")
	flag.Func("prompt", "`ids` with commas; once a sequence", rows(&given.prompts))
	flag.Func("source", "`ids` for the encoder, with commas; once a sequence", rows(&given.source))
	flag.IntVar(&given.most, "most", 20, "the most new tokens")
	flag.Func("stop", "`ids` that end a sequence, with commas", row(&given.stop))
	flag.Func("follow", "continue with these `ids` whatever is likeliest; once a sequence", rows(&given.follow))
	flag.Float64Var(&given.temperature, "temperature", 0, "0 takes the likeliest token, otherwise sampled")
	flag.IntVar(&given.topK, "top-k", 50, "sample from so many tokens")
	flag.Uint64Var(&given.seed, "seed", 0, "of the sampling")
	flag.StringVar(&given.selfTest, "self-test", "", "with --follow: also rewind,reorder, and compare")
	flag.Parse()
	if err := given.run(); err != nil {
		fmt.Fprintln(os.Stderr, "decode:", err)
		os.Exit(1)
	}
}

// run decodes: tokens go to standard output, a line for each sequence, measurements to standard error.
func (given *options) run() error {
	switch {
	case flag.NArg() > 0:
		return fmt.Errorf("unexpected argument %q", flag.Arg(0))
	case given.model == "":
		return errors.New("--model is missing")
	case len(given.prompts) == 0:
		return errors.New("--prompt is missing")
	case len(given.source) == 0:
		return errors.New("--source is missing")
	case given.most < 1 || given.topK < 1:
		return errors.New("--most and --top-k must be at least 1")
	}
	d, err := decoder.Open(given.model, nil)
	if err != nil {
		return err
	}
	defer d.Close()
	began := time.Now()
	if err := d.Encode(given.source, nil); err != nil {
		return err
	}
	var made [][]int64
	var times []time.Time
	if len(given.follow) > 0 {
		made, err = follow(d, given.prompts, given.follow, &times)
		if err == nil {
			err = selfTest(d, strings.Split(given.selfTest, ","), given.follow, made)
		}
	} else {
		how := decoder.Options{Most: given.most, Stop: given.stop}
		how.OnToken = func(int, int64) { times = append(times, time.Now()) }
		if given.temperature > 0 {
			how.Choose = sampler(given.temperature, given.topK, given.seed)
		}
		made, err = d.Generate(given.prompts, how)
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
		fmt.Fprintf(os.Stderr, "first token %.1f ms, %.1f tokens/s, peak memory %d MiB\n", first, rate, peakMiB())
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

func join(tokens []int64) string {
	texts := make([]string, len(tokens))
	for i, token := range tokens {
		texts[i] = strconv.FormatInt(token, 10)
	}
	return strings.Join(texts, ",")
}

// follow gives the likeliest token after the prompt and after each given one, whatever was likeliest before.
func follow(d *decoder.Decoder, prompts, given [][]int64, times *[]time.Time) ([][]int64, error) {
	for _, tokens := range given {
		if len(given) != len(prompts) || len(tokens) != len(given[0]) {
			return nil, errors.New("--follow: one for each prompt, all of the same length")
		}
	}
	made := make([][]int64, len(prompts))
	note := func(logits [][]float32) {
		for i := range made {
			made[i] = append(made[i], decoder.Likeliest(logits[i]))
		}
		*times = append(*times, time.Now())
	}
	logits, err := d.Prefill(prompts)
	if err != nil {
		return nil, err
	}
	note(logits)
	for i := range given[0] {
		step := make([][]int64, len(given))
		for j, tokens := range given {
			step[j] = tokens[i : i+1]
		}
		if logits, err = d.Step(step); err != nil {
			return nil, err
		}
		note(logits)
	}
	return made, nil
}

// selfTest takes the last step again after going back, and after changing rows: the likeliest tokens must be the same.
func selfTest(d *decoder.Decoder, wanted []string, given, made [][]int64) error {
	if len(given[0]) == 0 {
		return errors.New("--self-test needs tokens to follow")
	}
	last, expected := make([][]int64, len(given)), make([]int64, len(made))
	for i := range given {
		last[i] = given[i][len(given[i])-1:]
		expected[i] = made[i][len(made[i])-1]
	}
	if slices.Contains(wanted, "rewind") {
		if err := d.Rewind(1); err != nil {
			return err
		}
		if err := compare(d, "rewind", last, expected); err != nil {
			return err
		}
	}
	if slices.Contains(wanted, "reorder") {
		if err := d.Rewind(1); err != nil {
			return err
		}
		order := []int64{} // the rows backwards, and the first one once more
		for i := len(given) - 1; i >= 0; i-- {
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

// peakMiB is the largest resident memory of this process so far; 0 where the system does not tell.
func peakMiB() int {
	status, err := os.ReadFile("/proc/self/status") // on Linux
	if err != nil {
		return 0
	}
	for _, line := range strings.Split(string(status), "\n") {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "VmHWM:" {
			kib, _ := strconv.Atoi(fields[1])
			return kib / 1024
		}
	}
	return 0
}
