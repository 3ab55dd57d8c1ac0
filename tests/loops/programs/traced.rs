use std::borrow::Cow;
use std::error::Error;
use std::fs::File;

use ort::memory::Allocator;
use ort::session::{Session, SessionInputValue};
use ort::value::Tensor;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let mut trace = File::create(&arguments[2])?;
    let mut session = SESSION.commit_from_file(&arguments[1])?;
    let mut pasts = Vec::new();
    for name in ["0.key", "0.value", "1.key", "1.value"] {
        let empty = Tensor::<f32>::new(&Allocator::default(), [1_usize, 4, 0, 8])?;
        pasts.push((format!("past_key_values.{name}"), empty.into_dyn()));
    }
    for past in 0..4_usize {
        let mask = vec![1_i64; past + 1];
        let mut inputs: Vec<(Cow<str>, SessionInputValue)> = vec![
            ("input_ids".into(), Tensor::from_array(([1, 1], vec![5 + past as i64]))?.into()),
            ("position_ids".into(), Tensor::from_array(([1, 1], vec![past as i64]))?.into()),
            ("attention_mask".into(), Tensor::from_array(([1, past + 1], mask))?.into()),
        ];
        for (name, value) in &pasts {
            inputs.push((name.as_str().into(), value.into()));
        }
        SNIPPET
        let made = outputs.into_iter().filter_map(|(name, value)| {
            Some((format!("past_key_values.{}", name.strip_prefix("present.")?), value))
        });
        pasts = made.collect();
    }
    Ok(())
}
