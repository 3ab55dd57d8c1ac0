//! Steps of the program of a loop: `loop_steps MODEL PROMPT STEPS`.
//!
//! Each line of standard input is a number of steps to take; a line says when they are taken.

use std::env;
use std::error::Error;
use std::io;

use decode_loop::{Contract, Decoder, Settings, likeliest, ort};

fn main() -> Result<(), Box<dyn Error>> {
    let given: Vec<String> = env::args().skip(1).collect();
    let prompt: i64 = given[1].parse()?;
    let environment = ort::init().build()?;
    let contract = Contract::read("../loop/contract.json")?;
    let settings = Settings { threads: Some(1), ..Settings::default() };
    let mut decoder = Decoder::open(&environment, &given[0], contract, settings)?;
    let mut logits = decoder.prefill(&[(1..=prompt).collect::<Vec<_>>()])?;
    println!("ready");
    for line in io::stdin().lines() {
        let steps: usize = line?.parse()?;
        for _ in 0..steps {
            logits = decoder.step(&[[likeliest(&logits.last(0))]])?;
        }
        println!("done");
    }
    Ok(())
}
