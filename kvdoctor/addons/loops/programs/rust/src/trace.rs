//! Writes down what the loop fed and got, a line of JSON for each call: `kvdoctor step-test MODEL --trace FILE`.

use std::io::Write;

use half::{bf16, f16};
use ort::value::DynValue;
use serde_json::{Map, Value, json};

use crate::{Error, Result};

/// A line has all elements of a tensor that has no more, and so many of a larger one.
const MOST_ELEMENTS: usize = 64;

/// Where the lines go.
pub struct Trace {
    out: Box<dyn Write + Send>,
    run: Option<String>,
}

impl Trace {
    /// Writes into a file or another place; where several runs go into it, each has its name.
    pub fn new(out: impl Write + Send + 'static, run: Option<&str>) -> Self {
        Self { out: Box::new(out), run: run.map(str::to_owned) }
    }

    /// Writes down one call of a file of the model.
    pub(crate) fn write(
        &mut self,
        file: &str,
        fed: Map<String, Value>,
        got: std::result::Result<Map<String, Value>, &ort::Error>,
    ) -> Result<()> {
        let mut line = json!({"file": file, "fed": fed, "error": got.as_ref().err().map(|error| error.to_string())});
        if let Some(run) = &self.run {
            line["run"] = json!(run);
        }
        if let Ok(got) = got {
            line["got"] = json!(got);
        }
        writeln!(self.out, "{line}").map_err(|error| Error::File("the trace".into(), error))
    }
}

/// A tensor: its element type, its shape and its elements; those that the host cannot read are left out.
pub fn entry(name: &str, value: &DynValue) -> (String, Value) {
    let mut entry = json!({"dtype": value.data_type().to_string(), "shape": value.shape().to_vec()});
    macro_rules! elements {
        ($($kind:ty: $of:expr),*) => {
            $(if let Ok((_, data)) = value.try_extract_tensor::<$kind>() {
                let (name, elements) = sample(data, $of);
                entry[name] = elements;
            })*
        };
    }
    elements!(f32: |one| json!(one), f64: |one| json!(one), f16: |one: &f16| json!(one.to_f32()));
    elements!(bf16: |one: &bf16| json!(one.to_f32()), bool: |one| json!(one), i64: |one| json!(one));
    elements!(i32: |one| json!(one), i8: |one| json!(one), u8: |one| json!(one));
    (name.to_owned(), entry)
}

fn sample<T>(data: &[T], of: impl Fn(&T) -> Value) -> (&'static str, Value) {
    if data.len() <= MOST_ELEMENTS {
        return ("data", data.iter().map(of).collect());
    }
    let place = |k: usize| k * (data.len() - 1) / (MOST_ELEMENTS - 1);
    ("sample", (0..MOST_ELEMENTS).map(|k| of(&data[place(k)])).collect())
}
