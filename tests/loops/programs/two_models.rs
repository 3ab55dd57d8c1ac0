//! Two models in one process, and calls that cannot be right between calls that are.

use std::ops::ControlFlow;

use first_loop::ort;

macro_rules! decode {
    ($decoder:expr, $crate_name:ident) => {{
        let generation = $crate_name::Generation { most: 6, ..Default::default() };
        let choose = |row: &[f32], _: &[i64]| Ok($crate_name::likeliest(row));
        $decoder.generate(&[[5, 6, 7]], &generation, choose, |_| ControlFlow::Continue(())).unwrap()
    }};
}

fn refused<T>(result: first_loop::Result<T>, reason: &str) {
    let error = result.err().expect(reason).to_string();
    assert!(error.contains(reason), "{error}");
}

fn main() {
    let given: Vec<String> = std::env::args().collect();
    let environment = ort::init().build().unwrap();
    let contract = first_loop::Contract::read(&given[3]).unwrap();
    let mut llama = first_loop::Decoder::open(&environment, &given[1], contract.clone(), Default::default()).unwrap();
    let other = second_loop::Contract::read(&given[4]).unwrap();
    let mut marian = second_loop::Decoder::open(&environment, &given[2], other, Default::default()).unwrap();
    marian.encode_ids(&[[5, 6, 7]]).unwrap();
    let (first, second) = (decode!(llama, first_loop), decode!(marian, second_loop));
    assert_eq!((decode!(llama, first_loop), decode!(marian, second_loop)), (first.clone(), second.clone()));
    println!("{first:?} {second:?}");

    refused(first_loop::Decoder::open(&environment, &given[2], contract.clone(), Default::default()), "");
    llama.prefill(&[[5, 6, 7]]).unwrap();
    let expected = llama.step(&[[9]]).unwrap().last(0).into_owned();
    llama.rewind(1).unwrap();
    refused(llama.step(&[[4096]]), "token ids are 0 to 127, not 4096");
    refused(llama.step(&[[1], [2]]), "new tokens of 1 sequences");
    refused(llama.prefill(&[[]]), "at least one token");
    refused(llama.prefill(&[vec![1; 4097]]), "a sequence has at most");
    refused(llama.rewind(3), "cannot forget 3 of 3 tokens");
    refused(llama.reorder(&[1]), "are not rows of 1");
    refused(llama.encode_ids(&[[1]]), "no encoder");
    assert_eq!(llama.length(), 3);
    assert_eq!(*llama.step(&[[9]]).unwrap().last(0), expected[..]);

    let generation = first_loop::Generation { most: 6, ..Default::default() };
    let mut seen = Vec::new();
    let failing = |_: &[f32], so_far: &[i64]| match so_far.len() {
        5 => Err(first_loop::Error::Callback("no more".into())),
        _ => Ok(1),
    };
    refused(llama.generate(&[[5, 6, 7]], &generation, failing, |_| ControlFlow::Continue(())), "no more");
    let stop = |token: first_loop::Token| {
        seen.push(token.id);
        if seen.len() == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let choose = |row: &[f32], _: &[i64]| Ok(first_loop::likeliest(row));
    assert_eq!(llama.generate(&[[5, 6, 7]], &generation, choose, stop).unwrap(), [first[0][..2].to_vec()]);
    assert_eq!(llama.prefill(&[[5, 6, 7]]).unwrap().tokens(), 3);

    let text = std::fs::read_to_string(&given[3]).unwrap();
    for (now, reason) in [
        (text.replace("kvdoctor/loop/4", "kvdoctor/loop/9"), "unknown variant `kvdoctor/loop/9`"),
        (text.replace("\"feed-back\"", "\"image\""), "unknown variant `image`"),
        (text.replace("\"int64\"", "\"int32\""), "contract.json is of another model"),
    ] {
        let opened = now.parse().and_then(|contract| {
            first_loop::Decoder::open(&environment, &given[1], contract, Default::default())
        });
        refused(opened, reason);
    }
}
