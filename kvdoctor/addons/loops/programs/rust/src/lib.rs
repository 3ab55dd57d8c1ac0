//! Runs an ONNX decoder with a KV cache as its `contract.json` says.
//!
//! ```no_run
//! use decode_loop::{Contract, Decoder, Generation, Sampler, Sampling, Settings, ort};
//!
//! # fn main() -> decode_loop::Result<()> {
//! let environment = ort::init().build()?; // one for the process, whatever it runs
//! let contract = Contract::read("contract.json")?;
//! let mut decoder = Decoder::open(&environment, "path/to/the/model", contract, Settings::default())?;
//! let generation = Generation { most: 100, ..decoder.contract().generation.clone() };
//! let mut sampler = Sampler::new(Sampling { temperature: 0.8, top_p: 0.95, ..Sampling::default() });
//! let logits = decoder.prefill(&[[5, 6, 7]])?;
//! for step in decoder.tokens(logits, &[[5, 6, 7]], &generation, |row, so_far| Ok(sampler.choose(row, so_far)))? {
//!     println!("{}", step?[0].id);
//! }
//! # Ok(())
//! # }
//! ```

mod contract;
mod decoder;
mod generate;
mod graphs;
mod sampling;
mod state;
mod tensors;

pub use contract::{Contract, Generation};
pub use decoder::{Decoder, Settings};
pub use generate::{Token, Tokens};
pub use graphs::Trace;
pub use ort;
pub use sampling::{Sampler, Sampling, likeliest};
pub use tensors::Logits;

/// Why a call failed. The decoder is as it was before, but where a method says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The contract cannot be read or served, or it is of another model.
    #[error("{0}")]
    Contract(String),
    /// An argument cannot be right, or a call came too early.
    #[error("{0}")]
    Argument(String),
    #[error(transparent)]
    Runtime(ort::Error),
    #[error("{0}: {1}")]
    File(String, #[source] std::io::Error),
    /// What a callback returned.
    #[error(transparent)]
    Callback(Box<dyn std::error::Error + Send + Sync>),
}

/// What the methods return.
pub type Result<T> = std::result::Result<T, Error>;

/// The builders of ort have errors of types of their own.
impl<T> From<ort::Error<T>> for Error
where
    ort::Error: From<ort::Error<T>>,
{
    fn from(error: ort::Error<T>) -> Self {
        Self::Runtime(error.into())
    }
}

fn refuse<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::Argument(message.into()))
}
