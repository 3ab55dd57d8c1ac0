//! Runs an ONNX decoder with a KV cache as its `contract.json` says.
//!
//! ```no_run
//! use std::ops::ControlFlow;
//!
//! use decode_loop::{Contract, Decoder, Generation, Sampler, Sampling, Settings, ort};
//!
//! # fn main() -> decode_loop::Result<()> {
//! let environment = ort::init().build()?; // one for the process, whatever it runs
//! let contract = Contract::read("contract.json")?;
//! let mut decoder = Decoder::open(&environment, "path/to/the/model", contract, Settings::default())?;
//! let generation = Generation { most: 100, ..decoder.contract().generation.clone() };
//! let mut sampler = Sampler::new(Sampling { temperature: 0.8, top_p: 0.95, ..Sampling::default() });
//! let made = decoder.generate(
//!     &[[5, 6, 7]],
//!     &generation,
//!     |logits, tokens| Ok(sampler.choose(logits, tokens)),
//!     |token| {
//!         println!("{}", token.id);
//!         ControlFlow::Continue(())
//!     },
//! )?;
//! # let _ = made;
//! # Ok(())
//! # }
//! ```

mod contract;
mod decoder;
mod generate;
mod graph;
mod inputs;
mod sampling;
mod tensors;
mod trace;

use std::fmt;

pub use contract::{Contract, Generation, SCHEMA};
pub use decoder::{Decoder, Settings};
pub use generate::{Token, Tokens};
pub use ort;
pub use sampling::{Sampler, Sampling, likeliest};
pub use tensors::Logits;
pub use trace::Trace;

/// Why a call failed. The decoder is as it was before, but where a method says otherwise.
#[derive(Debug)]
pub enum Error {
    /// The contract cannot be read or served, or it is of another model.
    Contract(String),
    /// An argument cannot be right, or a call came too early.
    Argument(String),
    /// The runtime failed.
    Runtime(ort::Error),
    /// A file cannot be read or written.
    File(String, std::io::Error),
    /// What a callback returned.
    Callback(Box<dyn std::error::Error + Send + Sync>),
}

/// What the methods return.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    fn argument<T>(message: impl Into<String>) -> Result<T> {
        Err(Self::Argument(message.into()))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Contract(message) | Self::Argument(message) => formatter.write_str(message),
            Self::Runtime(error) => error.fmt(formatter),
            Self::File(file, error) => write!(formatter, "{file}: {error}"),
            Self::Callback(error) => error.fmt(formatter),
        }
    }
}

impl std::error::Error for Error {}

impl<T> From<ort::Error<T>> for Error
where
    ort::Error: From<ort::Error<T>>,
{
    fn from(error: ort::Error<T>) -> Self {
        Self::Runtime(error.into())
    }
}
