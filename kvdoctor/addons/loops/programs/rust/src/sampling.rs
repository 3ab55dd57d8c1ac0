//! How the next token is chosen from its logits.

use serde::Deserialize;

/// The likeliest token is taken at the temperature 0. What is not changed has no effect.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct Sampling {
    pub temperature: f32,
    /// Only so many of the likeliest tokens; 0 takes all.
    pub top_k: usize,
    /// Only the likeliest tokens that have this probability together.
    pub top_p: f32,
    /// Only tokens with this part of the probability of the likeliest one.
    pub min_p: f32,
    /// Logits of tokens that are there already are divided by it where they are positive, else multiplied.
    pub repetition_penalty: f32,
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }
}

/// Chooses tokens at random; the same seed gives the same tokens.
pub struct Sampler {
    sampling: Sampling,
    state: u64,
}

impl Sampler {
    pub fn new(sampling: Sampling) -> Self {
        Self { state: sampling.seed, sampling }
    }

    /// The next token, of a row of logits and the tokens so far.
    pub fn choose(&mut self, logits: &[f32], tokens: &[i64]) -> i64 {
        let Sampling { temperature, top_k, top_p, min_p, repetition_penalty: penalty, .. } = self.sampling;
        let mut scores = logits.to_vec();
        for token in tokens.iter().map(|token| *token as usize).filter(|token| *token < logits.len()) {
            let logit = logits[token];
            scores[token] = if logit > 0.0 { logit / penalty } else { logit * penalty };
        }
        if temperature <= 0.0 {
            return likeliest(&scores);
        }
        let order = |a: &usize, b: &usize| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b));
        let mut ids: Vec<usize> = (0..scores.len()).collect();
        if (1..ids.len()).contains(&top_k) {
            ids.select_nth_unstable_by(top_k - 1, order);
            ids.truncate(top_k);
        }
        ids.sort_unstable_by(order);
        let largest = scores[ids[0]];
        let weights: Vec<f32> = ids.iter().map(|id| ((scores[*id] - largest) / temperature).exp()).collect();
        let (most, mut reached) = (top_p * weights.iter().sum::<f32>(), 0.0);
        let in_top = weights.iter().take_while(|weight| {
            reached += **weight;
            reached - **weight < most
        });
        let count = in_top.take_while(|weight| **weight >= min_p).count().max(1);
        let mut left = self.uniform() * weights[..count].iter().sum::<f32>();
        let chosen = weights[..count].iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        ids[chosen.unwrap_or(0)] as i64
    }

    /// A number from 0 to 1, without 1 (SplitMix64).
    fn uniform(&mut self) -> f32 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1 << 24) as f32
    }
}

/// The token with the largest logit, and the first of them where several are as large.
pub fn likeliest(logits: &[f32]) -> i64 {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as i64
}
