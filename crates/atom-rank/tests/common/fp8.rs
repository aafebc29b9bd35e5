//! FP8 checkpoints of tiny models, made again from the weights' rule and compared, byte by byte, with those that another
//! program made and computed the references from.

use super::{golden, reference};
use atom_weights::{Checkpoint, DType, Fp8Scales, Tensor, dequantize, quant};
use safetensors::tensor::{Dtype, TensorView};
use std::sync::Arc;

/// The largest e4m3 number.
const E4M3_MAX: f32 = 448.0;

/// A tensor of the file.
struct Stored {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// The golden FP8 model, through a folder with its safetensors file.
pub fn checkpoint(name: &str) -> Arc<Checkpoint> {
    let config = std::fs::read_to_string(golden(name).join("config.json")).unwrap();
    let reference = reference(name);
    let model = Checkpoint::synthetic(&config, reference["salt"].as_u64().unwrap()).unwrap();
    let stored: Vec<Stored> = model.names().flat_map(|name| stored(&model, name, &reference)).collect();
    compare(&stored, &reference["tensors"]);
    // Tests of one process may make the same model at once.
    let unique = format!("{name}-{}-{:?}", std::process::id(), std::thread::current().id());
    let folder = std::env::temp_dir().join(format!("atom-{unique}"));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("config.json"), config).unwrap();
    let views = stored.iter().map(|tensor| {
        (&tensor.name, TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap())
    });
    std::fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    let opened = Checkpoint::open(&folder).unwrap();
    // The mapping keeps the bytes.
    std::fs::remove_dir_all(&folder).unwrap();
    Arc::new(opened)
}

/// A weight as the file has it, with its scales.
fn stored(model: &Checkpoint, name: &str, reference: &serde_json::Value) -> Vec<Stored> {
    let tensor = model.tensor(name).unwrap();
    let (shape, values) = (tensor.shape.clone(), dequantize(&tensor));
    let Some(module) = name.strip_suffix("weight").filter(|module| module.ends_with("_proj.")) else {
        let bytes = quant::quantize(DType::BF16, &values);
        return vec![Stored { name: name.into(), dtype: Dtype::BF16, shape, bytes }];
    };
    let dtype = if reference["scale_dtype"] == "F32" { DType::F32 } else { DType::BF16 };
    let (form, scale_shape, place) = places(model, &shape);
    let mut largest = vec![0.0_f32; scale_shape.iter().product()];
    for (index, value) in values.iter().enumerate() {
        let largest = &mut largest[place(index)];
        *largest = largest.max(value.abs());
    }
    let scales: Vec<f32> = largest.iter().map(|largest| largest / E4M3_MAX).collect();
    let scale_bytes = quant::quantize(dtype, &scales);
    let scales = quant::dequantize_bytes(dtype, &scale_bytes);
    let quotients: Vec<f32> = values.iter().enumerate().map(|(i, value)| value / scales[place(i)]).collect();
    let codes = quant::quantize(DType::F8_E4M3, &quotients);
    // What is read must be code times scale, by this other way to find the scale.
    let whole = Tensor::new(DType::F8_E4M3, shape.clone(), Arc::new(codes.clone()), 0, codes.len())
        .scaled(form, Tensor::from_f32(scale_shape.clone(), scales.clone()));
    let numbers = quant::dequantize_bytes(DType::F8_E4M3, &codes);
    assert!(dequantize(&whole).iter().enumerate().all(|(i, &found)| found == numbers[i] * scales[place(i)]));
    let kind = if dtype == DType::F32 { Dtype::F32 } else { Dtype::BF16 };
    let scale_name = format!("{module}{}", reference["scale_name"].as_str().unwrap());
    let mut stored = vec![
        Stored { name: name.into(), dtype: Dtype::F8_E4M3, shape, bytes: codes },
        Stored { name: scale_name, dtype: kind, shape: scale_shape, bytes: scale_bytes },
    ];
    if let Some(scale) = reference["input_scale"].as_f64() {
        let bytes = (scale as f32).to_le_bytes().to_vec();
        stored.push(Stored { name: format!("{module}input_scale"), dtype: Dtype::F32, shape: vec![], bytes });
    }
    stored
}

/// The index of an element's scale, by the element's own.
type Place = Box<dyn Fn(usize) -> usize>;

/// The form of a model's scales, their shape for a matrix, and which one an element has.
fn places(model: &Checkpoint, shape: &[usize]) -> (Fp8Scales, Vec<usize>, Place) {
    let (rows, cols) = (shape[0], shape[1]);
    let form = model.config().fp8.unwrap();
    match form {
        Fp8Scales::Tensor => (form, vec![], Box::new(|_| 0)),
        Fp8Scales::Channel => (form, vec![rows, 1], Box::new(move |index| index / cols)),
        Fp8Scales::Block { rows: high, cols: wide } => {
            let across = cols.div_ceil(wide);
            let place = move |index: usize| index / cols / high * across + index % cols / wide;
            (form, vec![rows.div_ceil(high), across], Box::new(place))
        }
    }
}

/// Types, shapes and checksums of all tensors.
fn compare(stored: &[Stored], expected: &serde_json::Value) {
    assert_eq!(stored.len(), expected.as_object().unwrap().len());
    for Stored { name, dtype, shape, bytes } in stored {
        let found = serde_json::json!([format!("{dtype:?}"), shape, crc32(bytes)]);
        assert_eq!(found, expected[name], "{name}");
    }
}

/// As in zlib.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg()))
    })
}
