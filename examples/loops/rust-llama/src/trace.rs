//! Writes down what the loop fed and got, a line of JSON for each call.
//!
//! `kvdoctor step-test MODEL --trace FILE` reads it.

use std::env;
use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};

use ort::value::DynValue;

/// A line has all elements of a tensor that has no more, and so many of a larger one.
const MOST_ELEMENTS: usize = 64;

/// The file for the lines, and what they begin with.
#[derive(Debug)]
pub struct Trace {
    file: File,
    run: String,
}

impl Trace {
    /// Writes into a file; where several runs go into it, each has its name.
    pub fn new(file: File, run: Option<&str>) -> Self {
        let run = run.map_or_else(String::new, |name| format!(r#""run":{},"#, json(name)));
        Self { file, run }
    }

    /// Adds to the file that the variable `KVDOCTOR_TRACE` names; `None` without it.
    pub fn from_environment() -> crate::Result<Option<Self>> {
        let Some(path) = env::var_os("KVDOCTOR_TRACE").filter(|path| !path.is_empty()) else {
            return Ok(None);
        };
        let file = OpenOptions::new().create(true).append(true).open(&path);
        let file = file.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Some(Self::new(file, None)))
    }

    /// Writes down one call of a file of the model, with the entries of its tensors.
    pub fn write(
        &self,
        file: &str,
        fed: &[String],
        got: &[String],
        error: Option<&str>,
    ) -> io::Result<()> {
        let (run, file, fed, got) = (&self.run, json(file), fed.join(","), got.join(","));
        let error = error.map_or_else(|| "null".into(), json);

        let call =
            format!(r#"{{{run}"file":{file},"fed":{{{fed}}},"got":{{{got}}},"error":{error}}}"#);
        (&self.file).write_all((call + "\n").as_bytes())
    }
}

/// A tensor: its element type, its shape and its elements.
pub fn entry(name: &str, value: &DynValue) -> String {
    let (name, dtype, shape) = (json(name), value.data_type(), &value.shape()[..]);
    let elements = elements(value).unwrap_or_default();

    format!(r#"{name}:{{"dtype":"{dtype}","shape":{shape:?}{elements}}}"#)
}

/// The elements that a line has, as a field; `None` where the host cannot read them.
fn elements(value: &DynValue) -> Option<String> {
    if value.shape().contains(&0) {
        return Some(r#","data":[]"#.into()); // reading it aborts a debug build with 2.0.0-rc.10
    }
    if let Ok((_, data)) = value.try_extract_tensor::<f32>() {
        return Some(field(data));
    }
    if let Ok((_, data)) = value.try_extract_tensor::<i64>() {
        return Some(field(data));
    }
    None
}

fn field<T: Copy + Debug>(data: &[T]) -> String {
    if data.len() <= MOST_ELEMENTS {
        return format!(r#","data":[{}]"#, list(data));
    }
    let place = |k: usize| k * (data.len() - 1) / (MOST_ELEMENTS - 1);
    let sample: Vec<T> = (0..MOST_ELEMENTS).map(|k| data[place(k)]).collect();
    format!(r#","sample":[{}]"#, list(&sample))
}

/// Numbers with commas; JSON has none that are not finite.
fn list<T: Debug>(data: &[T]) -> String {
    let texts = data.iter().map(|one| match format!("{one:?}") {
        text if text.contains("inf") || text.contains("NaN") => "null".into(),
        text => text,
    });
    texts.collect::<Vec<_>>().join(",")
}

/// A string of JSON.
pub fn json(text: &str) -> String {
    let escaped = text.chars().map(|char| match char {
        '"' | '\\' => format!("\\{char}"),
        '\0'..='\x1f' => format!("\\u{:04x}", char as u32),
        _ => char.into(),
    });
    format!("\"{}\"", escaped.collect::<String>())
}
