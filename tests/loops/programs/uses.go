// Two models in one process, and what the library refuses. Arguments: the folder of a model and its contract, of
// llama-gqa and of marian-4.46.3.
package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"time"

	"decodeloop"
)

var ctx = context.Background()

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func same[T any](got, wanted T) {
	if fmt.Sprint(got) != fmt.Sprint(wanted) {
		panic(fmt.Sprint(got, " in place of ", wanted))
	}
}

func refused[T any](_ T, err error) {
	if err == nil {
		panic("it was not refused")
	}
	fmt.Println(err)
}

func open(argument int) *decodeloop.Decoder {
	contract := must(decodeloop.ReadContract(os.Args[argument+1]))
	return must(decodeloop.Open(os.Args[argument], contract, decodeloop.Options{}))
}

// score is the log probability of tokens after a prompt.
func score(d *decodeloop.Decoder, prompt, tokens []int64) float64 {
	logits, all := must(d.Prefill(ctx, [][]int64{append(slices.Clone(prompt), tokens...)})), 0.0
	for i, token := range tokens {
		sum, row := 0.0, logits[0][len(prompt)-1+i]
		for _, logit := range row {
			sum += math.Exp(float64(logit))
		}
		all += float64(row[token]) - math.Log(sum)
	}
	return all
}

func main() {
	prompt, six := [][]int64{{5, 6, 7}}, decodeloop.Generation{Most: 6, Stop: []int64{}}
	source, two := [][]int64{{5, 6, 7}, {8, 9, 10}}, [][]int64{{1}, {2}}
	llama, other, marian := open(1), open(1), open(3)
	defer llama.Close()
	defer other.Close()
	defer marian.Close()

	// Calls of three decoders take turns.
	whole := must(llama.Generate(ctx, prompt, six))[0]
	must(0, marian.Encode(ctx, source))
	alone := must(marian.Generate(ctx, two, six))
	must(other.Prefill(ctx, [][]int64{{9, 8}}))
	must(0, marian.Encode(ctx, source))
	logits := must(marian.Prefill(ctx, two))
	at := 0
	for token, err := range llama.Tokens(ctx, prompt, six) {
		same(must(token, err), decodeloop.Token{Sequence: 0, ID: whole[at]})
		chosen := [][]int64{{decodeloop.Likeliest(logits.Last(0))}, {decodeloop.Likeliest(logits.Last(1))}}
		same(chosen, [][]int64{{alone[0][at]}, {alone[1][at]}})
		logits = must(marian.Step(ctx, chosen))
		must(other.Step(ctx, [][]int64{{3}}))
		at++
	}
	same(at, 6)

	// A second turn, and the logits of all new tokens.
	text := append(slices.Concat(prompt[0], whole), 8, 9)
	turn := decodeloop.Generation{Most: 3, Stop: []int64{}, Continue: true}
	second := must(llama.Generate(ctx, [][]int64{text[len(llama.History()[0]):]}, turn))
	all := must(other.Prefill(ctx, [][]int64{text}))
	same(second, must(other.Generate(ctx, [][]int64{text}, decodeloop.Generation{Most: 3, Stop: []int64{}})))
	same(decodeloop.Likeliest(all[0][2]), whole[0])

	// A search with beams finds no worse tokens than the likeliest ones, and one beam finds these.
	same(must(decodeloop.BeamSearch(ctx, other, prompt[0], 1, 6)), whole)
	found := must(decodeloop.BeamSearch(ctx, other, prompt[0], 4, 6))
	same(score(other, prompt[0], found) >= score(other, prompt[0], whole), true)

	// What fails changes nothing: a wrong call, a choice with an error, a context that ends.
	must(llama.Prefill(ctx, prompt))
	for _, wrong := range [][][]int64{{{128}}, {{-1}}, {{1}, {2}}, {{}}, {}, {make([]int64, 100)}} {
		refused(llama.Step(ctx, wrong))
	}
	refused(0, llama.Rewind(3))
	refused(llama.Prefill(ctx, [][]int64{{1}, {}}))
	ended, cancel := context.WithTimeout(ctx, time.Nanosecond)
	defer cancel()
	<-ended.Done()
	_, err := llama.Step(ended, [][]int64{{whole[0]}})
	same(errors.Is(err, context.DeadlineExceeded), true)
	same(decodeloop.Likeliest(must(llama.Step(ctx, [][]int64{{whole[0]}})).Last(0)), whole[1])
	failing := six
	failing.Choose = func([]float32, []int64) (int64, error) { return 0, errors.New("no choice") }
	refused(llama.Generate(ctx, prompt, failing))
	same(decodeloop.Likeliest(must(llama.Step(ctx, [][]int64{{whole[0]}})).Last(0)), whole[1])

	// A source.
	marian.Reset()
	refused(marian.Prefill(ctx, two))
	refused(0, marian.Encode(ctx, [][]int64{{5, -1}}))
	refused(0, marian.Encode(ctx, [][]int64{}))
	must(0, marian.Encode(ctx, source))
	refused(marian.Prefill(ctx, prompt))
	must(marian.Prefill(ctx, two))
	must(0, marian.Reorder([]int64{1, 0}))
	same(must(marian.Generate(ctx, two, six)), alone)
}
