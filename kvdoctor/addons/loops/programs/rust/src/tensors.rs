//! Values of the runtime: their elements as numbers of any type, their rows as bytes.

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Range;

use half::{bf16, f16};
use ort::memory::Allocator;
use ort::value::{DynTensor, PrimitiveTensorElementType, Tensor, TensorElementType};

use crate::contract::Dtype;
use crate::{Error, Result};

/// An element of a tensor.
pub trait Number: PrimitiveTensorElementType + Clone + Copy + Debug + 'static {
    fn of(value: f64) -> Self;
}

macro_rules! numbers {
    ($($kind:ty: $of:expr;)*) => {
        $(impl Number for $kind {
            fn of(value: f64) -> Self {
                $of(value)
            }
        })*
    };
}

numbers! {
    f32: |value| value as f32;
    f64: |value| value;
    f16: f16::from_f64;
    bf16: bf16::from_f64;
    i64: |value| value as i64;
    i32: |value| value as i32;
    i8: |value| value as i8;
    u8: |value| value as u8;
    bool: |value| value != 0.0;
}

/// The value of an expression with a type in place of an element type of the contract.
macro_rules! with_type {
    ($dtype:expr, $kind:ident => $made:expr) => {
        match $dtype {
            Dtype::Float => {
                type $kind = f32;
                $made
            }
            Dtype::Float16 => {
                type $kind = half::f16;
                $made
            }
            Dtype::Bfloat16 => {
                type $kind = half::bf16;
                $made
            }
            Dtype::Double => {
                type $kind = f64;
                $made
            }
            Dtype::Int64 => {
                type $kind = i64;
                $made
            }
            Dtype::Int32 => {
                type $kind = i32;
                $made
            }
            Dtype::Int8 => {
                type $kind = i8;
                $made
            }
            Dtype::Uint8 => {
                type $kind = u8;
                $made
            }
            Dtype::Bool => {
                type $kind = bool;
                $made
            }
        }
    };
}
pub(crate) use with_type;

/// A tensor of elements.
pub fn tensor<T: Number>(shape: &[usize], values: Vec<T>) -> Result<DynTensor> {
    if shape.iter().product::<usize>() != values.len() {
        return Error::argument(format!("{} elements do not make a tensor of shape {shape:?}", values.len()));
    }
    Ok(Tensor::from_array((shape.to_vec(), values))?.upcast())
}

/// A tensor of zeros.
pub fn zeros(dtype: Dtype, shape: &[usize]) -> Result<DynTensor> {
    Ok(DynTensor::new(&Allocator::default(), dtype.into(), shape)?)
}

/// The size of an axis.
pub fn size(value: &DynTensor, axis: usize) -> usize {
    value.shape().get(axis).map_or(0, |size| *size as usize)
}

/// Rows of tensors in sequence along an axis. It copies bytes, whatever the elements are.
pub fn join(axis: usize, pieces: &[(&DynTensor, Range<usize>)]) -> Result<DynTensor> {
    let Some((first, _)) = pieces.first() else {
        return Error::argument("there are no rows");
    };
    if let Some((value, rows)) = pieces.iter().find(|(value, rows)| rows.end > size(value, axis)) {
        return Error::argument(format!("a cache of shape {} has no rows {rows:?}", value.shape()));
    }
    let mut shape = first.shape().to_vec();
    let blocks = shape[..axis].iter().product::<i64>() as usize;
    shape[axis] = pieces.iter().map(|(_, rows)| rows.len() as i64).sum();
    let mut made = DynTensor::new(&Allocator::default(), *first.data_type(), shape)?;
    let mut rest = bytes_mut(&mut made);
    for block in 0..blocks {
        for (value, rows) in pieces.iter().filter(|(_, rows)| !rows.is_empty()) {
            let data = bytes(value);
            let row = data.len() / (blocks * size(value, axis));
            let begin = (block * size(value, axis) + rows.start) * row;
            let (part, after) = rest.split_at_mut(rows.len() * row);
            part.copy_from_slice(&data[begin..begin + rows.len() * row]);
            rest = after;
        }
    }
    Ok(made)
}

/// Writes the rows of a tensor over those of another one, from a row on.
pub fn write(target: &mut DynTensor, axis: usize, from: usize, value: &DynTensor) -> Result<()> {
    let (length, count) = (size(target, axis), size(value, axis));
    if from + count > length {
        return Error::argument(format!("the cache has room for {length} tokens"));
    }
    let blocks = target.shape()[..axis].iter().product::<i64>() as usize;
    let (target, data) = (bytes_mut(target), bytes(value));
    if data.is_empty() {
        return Ok(());
    }
    let (stride, part) = (target.len() / blocks, data.len() / blocks);
    for block in 0..blocks {
        let begin = block * stride + from * part / count;
        target[begin..begin + part].copy_from_slice(&data[block * part..(block + 1) * part]);
    }
    Ok(())
}

fn bytes(value: &DynTensor) -> &[u8] {
    match value.size() {
        None | Some(0) => &[], // the pointer may be null
        // SAFETY: the runtime holds so many bytes there, in host memory, as long as the value lives.
        Some(size) => unsafe { std::slice::from_raw_parts(value.data_ptr().cast(), size) },
    }
}

fn bytes_mut(value: &mut DynTensor) -> &mut [u8] {
    match value.size() {
        None | Some(0) => &mut [],
        // SAFETY: as above; the value is borrowed, so nothing else reads or writes it.
        Some(size) => unsafe { std::slice::from_raw_parts_mut(value.data_ptr_mut().cast(), size) },
    }
}

/// The logits of a call, where the runtime left them.
pub struct Logits {
    value: DynTensor,
    tokens: usize,
    width: usize,
}

impl Logits {
    pub(crate) fn new(value: DynTensor, batch: usize) -> Result<Self> {
        use TensorElementType::{Bfloat16, Float16, Float32, Float64};
        if !matches!(value.data_type(), Float32 | Float16 | Bfloat16 | Float64) {
            return Err(Error::Contract(format!("there are no logits of type {}", value.data_type())));
        }
        let shape = value.shape();
        let count = shape.iter().product::<i64>() as usize;
        let tokens = if shape.len() == 3 && size(&value, 0) == batch { size(&value, 1) } else { 1 };
        if count == 0 || !count.is_multiple_of(batch * tokens) {
            return Err(Error::Contract(format!("{shape} are not the logits of {batch} sequences")));
        }
        Ok(Self { tokens, width: count / batch / tokens, value })
    }

    /// The number of sequences.
    pub fn rows(&self) -> usize {
        self.value.shape().iter().product::<i64>() as usize / self.width / self.tokens
    }

    /// How many new tokens of a sequence have logits: all of the call, or the last one alone.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// What comes after the last token of a sequence: a logit for each id.
    pub fn last(&self, row: usize) -> Cow<'_, [f32]> {
        self.after(row, self.tokens - 1)
    }

    /// What comes after a new token of a sequence. Float32 is not copied.
    ///
    /// # Panics
    ///
    /// There is no such sequence or token.
    pub fn after(&self, row: usize, token: usize) -> Cow<'_, [f32]> {
        let begin = (row * self.tokens + token) * self.width;
        match self.value.data_type() {
            TensorElementType::Float16 => self.converted(begin, |value: &f16| value.to_f32()),
            TensorElementType::Bfloat16 => self.converted(begin, |value: &bf16| value.to_f32()),
            TensorElementType::Float64 => self.converted(begin, |value: &f64| *value as f32),
            _ => Cow::Borrowed(self.elements(begin)),
        }
    }

    fn elements<T: PrimitiveTensorElementType>(&self, begin: usize) -> &[T] {
        let (_, data) = self.value.try_extract_tensor::<T>().expect("logits have a type of floats");
        &data[begin..begin + self.width]
    }

    fn converted<T: PrimitiveTensorElementType>(&self, begin: usize, of: impl Fn(&T) -> f32) -> Cow<'_, [f32]> {
        Cow::Owned(self.elements(begin).iter().map(of).collect())
    }
}
