//! A beam search over the library, where the contract has `reorders`: `cargo run --example beams MODEL 5,6,7 3 20`.

use decode_loop::{Contract, Decoder, Settings, ort};

/// A sequence with the sum of its log probabilities, which becomes their mean where it has ended.
type Scored = (f32, Vec<i64>);

/// The new tokens with the best mean log probability that `beams` sequences find.
fn search(decoder: &mut Decoder, prompt: &[i64], beams: usize, most: usize) -> decode_loop::Result<Vec<i64>> {
    let end = decoder.contract().generation.end.clone();
    let mut logits = decoder.prefill(&[prompt])?;
    let (mut live, mut ended): (Vec<Scored>, Vec<Scored>) = (vec![(0.0, Vec::new())], Vec::new());
    for count in 1..=most {
        let mut found: Vec<(f32, usize, i64)> = Vec::new();
        for (row, (score, _)) in live.iter().enumerate() {
            let logits = logits.last(row);
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum = largest + logits.iter().map(|logit| (logit - largest).exp()).sum::<f32>().ln();
            found.extend(logits.iter().zip(0..).map(|(logit, id)| (score + logit - sum, row, id)));
        }
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        found.truncate(2 * beams);
        let ends = found.iter().take(beams).filter(|one| end.contains(&one.2));
        ended.extend(ends.map(|(score, row, _)| (score / count as f32, live[*row].1.clone())));
        ended.sort_by(|a, b| b.0.total_cmp(&a.0));
        ended.truncate(beams);
        let done = ended.len() == beams && ended[beams - 1].0 >= found[0].0 / count as f32;
        let going: Vec<_> = found.into_iter().filter(|one| !end.contains(&one.2)).take(beams).collect();
        live = going.iter().map(|(score, row, id)| (*score, [&live[*row].1[..], &[*id]].concat())).collect();
        if done || count == most || decoder.length() >= decoder.limit() {
            break;
        }
        decoder.reorder(&going.iter().map(|one| one.1).collect::<Vec<_>>())?;
        logits = decoder.step(&going.iter().map(|one| [one.2]).collect::<Vec<_>>())?;
    }
    let live = live.into_iter().map(|(score, ids)| (score / ids.len() as f32, ids));
    let best = ended.into_iter().chain(live).max_by(|a, b| a.0.total_cmp(&b.0));
    Ok(best.map(|(_, ids)| ids).unwrap_or_default())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let [model, prompt, beams, most] = &given[..] else {
        return Err("give MODEL PROMPT BEAMS MOST".into());
    };
    let environment = ort::init().build()?;
    let contract = Contract::read(format!("{}/contract.json", std::env::var("CARGO_MANIFEST_DIR")?))?;
    let mut decoder = Decoder::open(&environment, model, contract, Settings::default())?;
    let prompt: Vec<i64> = prompt.split(',').map(str::parse).collect::<Result<_, _>>()?;
    println!("{:?}", search(&mut decoder, &prompt, beams.parse()?, most.parse()?)?);
    Ok(())
}
