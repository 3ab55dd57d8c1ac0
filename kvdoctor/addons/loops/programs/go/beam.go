package decodeloop

import (
	"cmp"
	"context"
	"math"
	"slices"
)

// beam is a sequence of a search: its log probability, the row that it continues, its new tokens, and the last one found for them.
type beam struct {
	score  float64
	row    int64
	tokens []int64
	token  int64
}

// BeamSearch is an example over the library, for a model whose contract has Reorders: the tokens with the best mean log
// probability that so many beams find, with the token that ended them. It ends when as many have ended. An encoder reads
// the source once for each beam.
func BeamSearch(ctx context.Context, d *Decoder, prompt []int64, beams, most int) ([]int64, error) {
	going, ended := []beam{{}}, []beam{} // all beams begin with the same prompt: one is enough
	logits, err := d.Prefill(ctx, slices.Repeat([][]int64{prompt}, beams))
	for count := 1; err == nil; count++ {
		found := []beam{}
		for row, one := range going {
			last, sum := logits.Last(row), 0.0
			top := float64(slices.Max(last)) // taken off, so that no power overflows
			for _, logit := range last {
				sum += math.Exp(float64(logit) - top)
			}
			for token, logit := range last {
				score := one.score + float64(logit) - top - math.Log(sum)
				found = append(found, beam{score, int64(row), one.tokens, int64(token)})
			}
		}
		slices.SortStableFunc(found, func(a, b beam) int { return cmp.Compare(b.score, a.score) })
		next, rows, fed := []beam{}, []int64{}, [][]int64{}
		for _, one := range found {
			one.tokens = append(slices.Clone(one.tokens), one.token)
			if slices.Contains(d.contract.Generation.End, one.token) {
				ended = append(ended, one)
				continue
			}
			next, rows, fed = append(next, one), append(rows, one.row), append(fed, []int64{one.token})
			if len(next) == beams {
				break
			}
		}
		if len(ended) >= beams || count == most || d.length >= d.MostTokens() {
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
