//! Steps of the generated loop: `loop_steps MODEL PROMPT STEPS`.
//!
//! Each line of standard input is a number of steps to take; the seconds that they took are printed.

use std::env;
use std::io;
use std::time::Instant;

use decode_loop::{Decoder, Result, likeliest};

fn main() -> Result<()> {
    let given: Vec<String> = env::args().skip(1).collect();
    let prompt: i64 = given[1].parse()?;
    let mut decoder = Decoder::open(&given[0])?;
    let mut logits = decoder.prefill(&[(1..=prompt).collect::<Vec<_>>()])?;
    println!("ready");
    for line in io::stdin().lines() {
        let steps: usize = line?.parse()?;
        let began = Instant::now();
        for _ in 0..steps {
            logits = decoder.step(&[[likeliest(&logits[0])]])?;
        }
        println!("{}", began.elapsed().as_secs_f64());
    }
    Ok(())
}
