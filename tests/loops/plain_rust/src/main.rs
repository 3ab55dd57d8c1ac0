//! A plain loop over a merged Marian decoder: it feeds every present back, and prints a token a step.

use std::collections::HashMap;

use ort::memory::Allocator;
use ort::session::{Session, SessionInputValue};
use ort::value::{DynValue, Tensor};

type Feeds<'a> = Vec<(String, SessionInputValue<'a>)>;

fn main() -> ort::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, folder, source, start, steps] = arguments.as_slice() else {
        panic!("plain-loop FOLDER SOURCE START STEPS");
    };
    let source: Vec<i64> = source
        .split(',')
        .map(|id| id.parse().expect("an id"))
        .collect();
    let mut encoder =
        Session::builder()?.commit_from_file(format!("{folder}/encoder_model.onnx"))?;
    let mut decoder =
        Session::builder()?.commit_from_file(format!("{folder}/decoder_model_merged.onnx"))?;

    let shape = [1, source.len()];
    let mask = Tensor::from_array((shape, vec![1_i64; source.len()]))?;
    let ids = Tensor::from_array((shape, source))?;
    let feeds: Feeds = vec![
        ("input_ids".into(), ids.into()),
        ("attention_mask".into(), (&mask).into()),
    ];
    let states = encoder
        .run(feeds)?
        .remove("last_hidden_state")
        .expect("encoder states");

    let names: Vec<String> = decoder
        .outputs
        .iter()
        .map(|output| output.name.clone())
        .collect();
    let names = names
        .iter()
        .filter_map(|name| name.strip_prefix("present."));
    let names: Vec<String> = names.map(str::to_owned).collect();
    let mut past: HashMap<String, DynValue> = HashMap::new();
    for input in &decoder.inputs {
        if let Some(name) = input.name.strip_prefix("past_key_values.") {
            let shape = input.input_type.tensor_shape().expect("a tensor");
            let shape = [1, shape[1] as usize, 1, shape[3] as usize];
            past.insert(
                name.into(),
                Tensor::<f32>::new(&Allocator::default(), shape)?.into_dyn(),
            );
        }
    }

    let mut token: i64 = start.parse().expect("an id");
    for step in 0..steps.parse().expect("a number") {
        let mut feeds: Feeds = vec![
            (
                "input_ids".into(),
                Tensor::from_array(([1, 1], vec![token]))?.into(),
            ),
            (
                "use_cache_branch".into(),
                Tensor::from_array(([1], vec![step > 0]))?.into(),
            ),
            ("encoder_hidden_states".into(), (&states).into()),
            ("encoder_attention_mask".into(), (&mask).into()),
        ];
        for (name, value) in &past {
            feeds.push((format!("past_key_values.{name}"), value.into()));
        }
        let mut outputs = match decoder.run(feeds) {
            Ok(outputs) => outputs,
            Err(error) => {
                eprintln!("step {}: {error}", step + 1);
                std::process::exit(1);
            }
        };
        let (_, logits) = outputs["logits"].try_extract_tensor::<f32>()?;
        let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
        token = best.expect("logits") as i64;
        println!("{token}");
        for name in &names {
            let present = outputs
                .remove(format!("present.{name}"))
                .expect("a present");
            past.insert(name.clone(), present);
        }
    }
    Ok(())
}
