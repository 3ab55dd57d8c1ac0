package decodeloop

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"slices"

	ort "github.com/yalue/onnxruntime_go"
)

// Logits are those of a call: for each sequence a row for each new token, or the last row alone where the graph returns
// no more. In rows of a prefill the padding on the left counts.
type Logits [][][]float32

// Last is the row after the last token of a sequence.
func (l Logits) Last(sequence int) []float32 { return l[sequence][len(l[sequence])-1] }

func (d *Decoder) logits(value ort.Value, batch int64) Logits {
	shape, numbers := value.GetShape(), floats(value)
	each := int64(len(numbers)) / batch
	width := each
	if len(shape) == 3 && shape[0] == batch { // a row for each new token
		width = shape[2]
	}
	made := make(Logits, batch)
	for row := range made {
		for rows := numbers[int64(row)*each : int64(row+1)*each]; len(rows) > 0; rows = rows[width:] {
			made[row] = append(made[row], rows[:width:width])
		}
	}
	return made
}

// Likeliest is the token with the largest of the logits.
func Likeliest(logits []float32) int64 {
	best := 0
	for i, logit := range logits {
		if logit > logits[best] {
			best = i
		}
	}
	return int64(best)
}

// Choose picks the next token of a sequence. It may change the logits; the tokens are those of the sequence so far.
type Choose func(logits []float32, tokens []int64) (int64, error)

// Generation says how tokens are generated. The zero value takes the likeliest tokens, 20 at most.
type Generation struct {
	Most     int     // the most new tokens of a sequence; 0 is 20
	Stop     []int64 // tokens that end a sequence; nil are those of the contract
	Choose   Choose  // nil takes the likeliest token
	Continue bool    // the prompts follow the tokens in the cache, in place of beginning sequences
}

// Token is a new token of a sequence.
type Token struct {
	Sequence int
	ID       int64
}

// Tokens generates one token after another, those of all sequences in turn. After an error it ends; leaving the loop
// earlier is no error. The token that ends a sequence is not among them, and is not fed either.
func (d *Decoder) Tokens(ctx context.Context, prompts [][]int64, how Generation) iter.Seq2[Token, error] {
	return func(yield func(Token, error) bool) {
		if err := d.generate(ctx, prompts, how, yield); err != nil {
			yield(Token{}, err)
		}
	}
}

// Generate collects the new tokens of each sequence; with an error those that came before it.
func (d *Decoder) Generate(ctx context.Context, prompts [][]int64, how Generation) ([][]int64, error) {
	made := make([][]int64, len(prompts))
	for token, err := range d.Tokens(ctx, prompts, how) {
		if err != nil {
			return made, err
		}
		made[token.Sequence] = append(made[token.Sequence], token.ID)
	}
	return made, nil
}

func (d *Decoder) generate(
	ctx context.Context, prompts [][]int64, how Generation, yield func(Token, error) bool,
) error {
	most, stop, begin := cmp.Or(how.Most, 20), how.Stop, d.Prefill
	if most < 0 {
		return errors.New("the most new tokens are at least 1")
	}
	if stop == nil {
		stop = d.contract.Generation.End
	}
	if how.Continue && d.length > 0 {
		begin = d.Step
	}
	logits, err := begin(ctx, prompts)
	if err != nil {
		return err
	}
	ended := make([]bool, len(prompts))
	for count := 1; ; count++ {
		chosen := make([][]int64, len(prompts))
		for row := range chosen {
			token, err := d.choose(logits.Last(row), d.history[row], how, count == 1)
			if err != nil {
				return err
			}
			chosen[row] = []int64{token}
			ended[row] = ended[row] || slices.Contains(stop, token)
			if !ended[row] && !yield(Token{row, token}, nil) {
				return nil
			}
		}
		if count >= most || d.length >= d.MostTokens() || !slices.Contains(ended, false) {
			return nil
		}
		if logits, err = d.Step(ctx, chosen); err != nil {
			return err
		}
	}
}

// choose picks a token, from those that the contract leaves.
func (d *Decoder) choose(logits []float32, tokens []int64, how Generation, first bool) (int64, error) {
	ids := d.contract.Generation
	for _, forced := range ids.Forced {
		if forced[0] == int64(len(tokens)) {
			return forced[1], nil
		}
	}
	suppress(logits, ids.Suppress)
	if first {
		suppress(logits, ids.BeginSuppress)
	}
	if how.Choose == nil {
		return Likeliest(logits), nil
	}
	return how.Choose(logits, tokens)
}

func suppress(logits []float32, ids []int64) {
	for _, id := range ids {
		if id < int64(len(logits)) {
			logits[id] = float32(math.Inf(-1))
		}
	}
}

// Sampling picks tokens by their probabilities. A zero leaves its part out; without a temperature the likeliest token
// is taken.
type Sampling struct {
	Temperature       float64
	TopK              int     `json:"top_k"`              // from so many of the likeliest tokens
	TopP              float64 `json:"top_p"`              // from the likeliest tokens that have this probability together
	MinP              float64 `json:"min_p"`              // from tokens with this part of the probability of the likeliest one
	RepetitionPenalty float64 `json:"repetition_penalty"` // divides the logits of tokens that are there, where they are above 0, else multiplies
	Seed              uint64
}

// Sampler is a Choose that samples.
func (s Sampling) Sampler() (Choose, error) {
	for _, number := range []float64{s.Temperature, s.TopP, s.MinP, s.RepetitionPenalty, float64(s.TopK)} {
		if !(number >= 0) { // NaN as well
			return nil, fmt.Errorf("no part of a sampling is %v", number)
		}
	}
	random := rand.New(rand.NewPCG(s.Seed, 0))
	return func(logits []float32, tokens []int64) (int64, error) {
		penalty := float32(cmp.Or(s.RepetitionPenalty, 1))
		for _, token := range slices.Compact(slices.Sorted(slices.Values(tokens))) {
			if logits[token] > 0 {
				logits[token] /= penalty
			} else {
				logits[token] *= penalty
			}
		}
		if s.Temperature == 0 {
			return Likeliest(logits), nil
		}
		return s.draw(logits, random), nil
	}, nil
}

// draw picks one of the likeliest tokens.
func (s Sampling) draw(logits []float32, random *rand.Rand) int64 {
	tokens := make([]int, len(logits))
	for i := range tokens {
		tokens[i] = i
	}
	slices.SortStableFunc(tokens, func(a, b int) int { return cmp.Compare(logits[b], logits[a]) })
	tokens = tokens[:min(cmp.Or(s.TopK, len(tokens)), len(tokens))]
	weights, all, sum, count := make([]float64, len(tokens)), 0.0, 0.0, 0
	for i, token := range tokens {
		weights[i] = math.Exp(float64(logits[token]-logits[tokens[0]]) / s.Temperature)
		all += weights[i]
	}
	for count < len(tokens) && (count == 0 || sum < cmp.Or(s.TopP, 1)*all && weights[count] >= s.MinP) {
		sum += weights[count]
		count++
	}
	left := random.Float64() * sum
	for i := range count {
		if left -= weights[i]; left < 0 {
			return int64(tokens[i])
		}
	}
	return int64(tokens[0])
}
