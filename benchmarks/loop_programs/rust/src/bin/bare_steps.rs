//! The calls of that loop without a loop: `bare_steps MODEL PROMPT STEPS`.
//!
//! All inputs but the cache are made in advance.

use std::env;
use std::error::Error;
use std::io;

use ort::memory::Allocator;
use ort::session::{Session, SessionInputValue};
use ort::value::{DynValue, Tensor, ValueType};

type Inputs = Vec<(&'static str, Tensor<i64>)>;

struct Bare {
    session: Session,
    /// They stay in memory to the end, so that what is measured of it is the cache.
    calls: Vec<Inputs>,
    done: usize,
    cache: Vec<(String, DynValue)>,
}

impl Bare {
    fn call(&mut self) -> Result<(), Box<dyn Error>> {
        let inputs = self.calls.get(self.done).ok_or("no more steps were prepared")?;
        let mut feeds: Vec<(&str, SessionInputValue)> =
            inputs.iter().map(|(name, value)| (*name, value.into())).collect();
        feeds.extend(self.cache.iter().map(|(name, value)| (name.as_str(), value.into())));
        let mut outputs = self.session.run(feeds)?;
        let mut cache = Vec::new();
        for (name, _) in &self.cache {
            let present = name.replace("past_key_values", "present");
            cache.push((name.clone(), outputs.remove(present).ok_or("an output is missing")?));
        }
        drop(outputs);
        self.cache = cache;
        self.done += 1;
        Ok(())
    }
}

fn made(past: i64, new: i64) -> ort::Result<Inputs> {
    let (count, total) = (new as usize, (past + new) as usize);
    Ok(vec![
        ("input_ids", Tensor::from_array(([1, count], (1..=new).collect::<Vec<_>>()))?),
        ("attention_mask", Tensor::from_array(([1, total], vec![1; total]))?),
        ("position_ids", Tensor::from_array(([1, count], (past..past + new).collect::<Vec<_>>()))?),
    ])
}

fn main() -> Result<(), Box<dyn Error>> {
    let given: Vec<String> = env::args().skip(1).collect();
    let (prompt, steps): (i64, i64) = (given[1].parse()?, given[2].parse()?);
    let environment = ort::init().build()?;
    let file = format!("{}/model.onnx", given[0]);
    let session = Session::builder(&environment)?.with_intra_threads(1)?.commit_from_file(file)?;
    let mut cache = Vec::new();
    for input in session.inputs().iter().filter(|input| input.name().starts_with("past")) {
        let ValueType::Tensor { shape, .. } = input.dtype() else { continue };
        let shape = [1, shape[1] as usize, 0, shape[3] as usize];
        let zeros = Tensor::<f32>::new(&Allocator::default(), shape)?;
        cache.push((input.name().to_owned(), zeros.into_dyn()));
    }
    let mut calls = vec![made(0, prompt)?];
    for step in 0..steps {
        calls.push(made(prompt + step, 1)?);
    }
    let mut bare = Bare { session, calls, done: 0, cache };
    bare.call()?;
    println!("ready");
    for line in io::stdin().lines() {
        for _ in 0..line?.parse()? {
            bare.call()?;
        }
        println!("done");
    }
    Ok(())
}
