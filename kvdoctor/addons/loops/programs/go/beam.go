package decodeloop

import (
	"cmp"
	"context"
	"math"
	"slices"
)

// beam is a sequence of a search: its log probability and its new tokens.
type beam struct {
	score  float64
	tokens []int64
}

// candidate is a token that may continue the beam of a row, with the log probability of both.
type candidate struct {
	score      float64
	row, token int64
}

// BeamSearch is an example over the library, for a model whose contract has Reorders: the tokens with the best mean log
// probability that so many beams find, with the token that ended them. It ends when as many have ended. An encoder reads
// the source once for each beam.
func BeamSearch(ctx context.Context, d *Decoder, prompt []int64, beams, most int) ([]int64, error) {
	going, ended := []beam{{}}, []beam{} // all beams begin with the same prompt: one is enough
	logits, err := d.Prefill(ctx, slices.Repeat([][]int64{prompt}, beams))
	for count := 1; err == nil; count++ {
		found := []candidate{}
		for row, one := range going {
			found = append(found, one.candidates(int64(row), logits.Last(row))...)
		}
		slices.SortStableFunc(found, func(a, b candidate) int { return cmp.Compare(b.score, a.score) })
		next, rows, fed := []beam{}, make([]int64, beams), make([][]int64, beams)
		for _, one := range found {
			made := beam{one.score, append(slices.Clone(going[one.row].tokens), one.token)}
			if slices.Contains(d.contract.Generation.End, one.token) {
				ended = append(ended, made)
				continue
			}
			rows[len(next)], fed[len(next)] = one.row, []int64{one.token}
			if next = append(next, made); len(next) == beams {
				break
			}
		}
		if len(ended) >= beams || count == most || d.length == d.MostTokens() {
			mean := func(one beam) float64 { return one.score / float64(len(one.tokens)) }
			all := slices.Concat(ended, next)
			return slices.MaxFunc(all, func(a, b beam) int { return cmp.Compare(mean(a), mean(b)) }).tokens, nil
		}
		if going, err = next, d.Reorder(rows); err == nil {
			logits, err = d.Step(ctx, fed)
		}
	}
	return nil, err
}

func (b beam) candidates(row int64, logits []float32) []candidate {
	most, sum := float64(slices.Max(logits)), 0.0
	for _, logit := range logits {
		sum += math.Exp(float64(logit) - most)
	}
	found := make([]candidate, len(logits))
	for token, logit := range logits {
		found[token] = candidate{b.score + float64(logit) - most - math.Log(sum), row, int64(token)}
	}
	return found
}
