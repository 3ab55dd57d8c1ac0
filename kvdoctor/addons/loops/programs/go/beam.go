package decodeloop

import (
	"cmp"
	"context"
	"math"
	"slices"
)

// beam is a sequence of a search: its log probability, the sequence that it continues, and its new tokens.
type beam struct {
	score  float64
	row    int64
	tokens []int64
}

func (b beam) mean() float64 { return b.score / float64(len(b.tokens)) }

func best(a, b beam) int { return cmp.Compare(b.score, a.score) }

// BeamSearch is an example over the library, for a model whose contract has Reorders: the tokens with the best mean log
// probability that so many beams find, with the token that ended them. It ends when as many have ended. An encoder reads the source once for each beam.
func BeamSearch(ctx context.Context, d *Decoder, prompt []int64, beams, most int) ([]int64, error) {
	going, ended := []beam{{}}, []beam{} // all beams begin with the same prompt: one is enough
	ends := d.contract.Generation.End
	width := beams * (1 + len(ends)) // so many have as many as there are beams that do not end
	logits, err := d.Prefill(ctx, slices.Repeat([][]int64{prompt}, beams))
	for count := 1; err == nil; count++ {
		found := []beam{}
		for row, one := range going {
			found = append(found, one.next(int64(row), logits.Last(row), width)...)
		}
		slices.SortStableFunc(found, best)
		going = going[:0]
		for _, one := range found[:min(width, len(found))] {
			if !slices.Contains(ends, one.tokens[count-1]) {
				going = append(going, one)
			} else if len(going) < beams {
				ended = append(ended, one)
			}
		}
		going = going[:min(beams, len(going))]
		if len(ended) >= beams || count == most || d.length == d.MostTokens() {
			all := slices.Concat(ended, going)
			return slices.MaxFunc(all, func(a, b beam) int { return cmp.Compare(a.mean(), b.mean()) }).tokens, nil
		}
		rows, tokens := make([]int64, beams), make([][]int64, beams)
		for i, one := range going {
			rows[i], tokens[i] = one.row, one.tokens[count-1:]
		}
		if err = d.Reorder(rows); err == nil {
			logits, err = d.Step(ctx, tokens)
		}
	}
	return nil, err
}

// next are the likeliest continuations of a beam by one token.
func (b beam) next(row int64, logits []float32, count int) []beam {
	most, sum := float64(slices.Max(logits)), 0.0
	for _, logit := range logits {
		sum += math.Exp(float64(logit) - most)
	}
	found := make([]beam, len(logits))
	for token, logit := range logits {
		found[token] = beam{b.score + float64(logit) - most - math.Log(sum), row, []int64{int64(token)}}
	}
	slices.SortStableFunc(found, best)
	found = found[:min(count, len(found))]
	for i := range found {
		found[i].tokens = slices.Concat(b.tokens, found[i].tokens)
	}
	return found
}
