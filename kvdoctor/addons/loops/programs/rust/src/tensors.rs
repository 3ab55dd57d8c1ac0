//! Values of the runtime: their elements as numbers of any type, their rows as bytes.

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Range;

use half::{bf16, f16};
use ort::memory::Allocator;
use ort::value::TensorElementType::{self, Bfloat16, Bool, Float16, Float32, Float64, Int8, Int32, Int64, Uint8};
use ort::value::{DynTensor, PrimitiveTensorElementType, Tensor};

use crate::{Error, Result, refuse};

/// A tensor of numbers, in the element type of the contract.
pub fn tensor(dtype: TensorElementType, shape: &[usize], values: &[f64]) -> Result<DynTensor> {
    fn typed<T>(shape: &[usize], values: &[f64], of: impl Fn(f64) -> T) -> Result<DynTensor>
    where
        T: PrimitiveTensorElementType + Clone + Debug + 'static,
    {
        let elements: Vec<T> = values.iter().map(|value| of(*value)).collect();
        Ok(Tensor::from_array((shape, elements))?.upcast())
    }
    match dtype {
        Float32 => typed(shape, values, |value| value as f32),
        Float16 => typed(shape, values, f16::from_f64),
        Bfloat16 => typed(shape, values, bf16::from_f64),
        Float64 => typed(shape, values, |value| value),
        Int64 => typed(shape, values, |value| value as i64),
        Int32 => typed(shape, values, |value| value as i32),
        Int8 => typed(shape, values, |value| value as i8),
        Uint8 => typed(shape, values, |value| value as u8),
        Bool => typed(shape, values, |value| value != 0.0),
        other => Err(Error::Contract(format!("this program makes no tensors of {other}"))),
    }
}

/// A tensor of zeros.
pub fn zeros(dtype: TensorElementType, shape: &[usize]) -> Result<DynTensor> {
    Ok(DynTensor::new(&Allocator::default(), dtype, shape)?)
}

/// The size of an axis.
pub fn size(value: &DynTensor, axis: usize) -> usize {
    value.shape().get(axis).map_or(0, |size| *size as usize)
}

/// The product of the sizes before an axis.
fn blocks(value: &DynTensor, axis: usize) -> usize {
    value.shape()[..axis].iter().product::<i64>() as usize
}

/// Rows of tensors in sequence along an axis. It copies bytes, whatever the elements are.
pub fn join(axis: usize, pieces: &[(&DynTensor, Range<usize>)]) -> Result<DynTensor> {
    let first = pieces[0].0;
    if let Some((value, rows)) = pieces.iter().find(|(value, rows)| rows.end > size(value, axis)) {
        return refuse(format!("a cache of shape {} has no rows {rows:?}", value.shape()));
    }
    let mut shape = first.shape().to_vec();
    shape[axis] = pieces.iter().map(|(_, rows)| rows.len() as i64).sum();
    let mut made = DynTensor::new(&Allocator::default(), *first.data_type(), shape)?;
    let (blocks, mut rest) = (blocks(first, axis), bytes_mut(&mut made));
    for block in 0..blocks {
        for (value, rows) in pieces.iter().filter(|(_, rows)| !rows.is_empty()) {
            let (data, length) = (bytes(value), size(value, axis));
            let row = data.len() / (blocks * length);
            let (begin, end) = (block * length + rows.start, block * length + rows.end);
            let (part, after) = rest.split_at_mut(rows.len() * row);
            part.copy_from_slice(&data[begin * row..end * row]);
            rest = after;
        }
    }
    Ok(made)
}

/// Writes the rows of a tensor over those of another one, from a row on.
pub fn write(target: &mut DynTensor, axis: usize, from: usize, value: &DynTensor) -> Result<()> {
    let (length, count, blocks) = (size(target, axis), size(value, axis), blocks(target, axis));
    if from + count > length {
        return refuse(format!("the cache has room for {length} tokens"));
    }
    let (target, data) = (bytes_mut(target), bytes(value));
    let (stride, part) = (target.len() / blocks, data.len() / blocks);
    for block in 0..blocks {
        let begin = block * stride + from * (stride / length);
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
    rows: usize,
    tokens: usize,
    width: usize,
}

impl Logits {
    pub(crate) fn new(value: DynTensor, rows: usize) -> Result<Self> {
        let shape = value.shape();
        let count = shape.iter().product::<i64>() as usize;
        let tokens = if shape.len() == 3 && size(&value, 0) == rows { size(&value, 1) } else { 1 };
        let floats = matches!(value.data_type(), Float32 | Float16 | Bfloat16 | Float64);
        if !floats || count == 0 || !count.is_multiple_of(rows * tokens) {
            let dtype = value.data_type();
            return Err(Error::Contract(format!("{dtype}{shape} are not the logits of {rows} sequences")));
        }
        Ok(Self { rows, tokens, width: count / rows / tokens, value })
    }

    /// The number of sequences.
    pub fn rows(&self) -> usize {
        self.rows
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
        let place = row * self.tokens + token;
        match self.value.data_type() {
            Float16 => self.elements(place).iter().copied().map(f16::to_f32).collect(),
            Bfloat16 => self.elements(place).iter().copied().map(bf16::to_f32).collect(),
            Float64 => self.elements(place).iter().map(|value: &f64| *value as f32).collect(),
            _ => Cow::Borrowed(self.elements(place)),
        }
    }

    fn elements<T: PrimitiveTensorElementType>(&self, place: usize) -> &[T] {
        let (_, data) = self.value.try_extract_tensor::<T>().expect("logits have a type of floats");
        &data[place * self.width..(place + 1) * self.width]
    }
}
