//! Norm, router and choice in one launch.

use crate::kit::Kit;
use crate::route::reference;
use atom_cuda::launch::norm::NormWeight;
use atom_cuda::launch::router_few::{self, RouterArrays};
use atom_cuda::launch::rows::RowExtent;
use atom_cuda::{Address, CudaError, Element};
use atom_ops::{NO_EXPERT, RouteSpec};

/// Experts, choices, groups, groups that stay, hidden.
const SHAPES: &[(usize, usize, usize, usize, usize)] = &[
    (128, 8, 1, 1, 2048),
    (16, 4, 4, 2, 4),
    (60, 4, 1, 1, 1412),
    (128, 8, 1, 1, 4096),
    (97, 32, 1, 1, 2052),
    (5, 2, 1, 1, 264),
    (64, 6, 8, 3, 1024),
];

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    if kit.device.properties().capability < (9, 0) {
        return Ok(());
    }
    for &(experts, top_k, groups, groups_kept, hidden) in SHAPES {
        for (is_sigmoid, has_bias) in [(false, false), (true, true)] {
            let spec =
                RouteSpec { experts, top_k, is_sigmoid, groups, groups_kept, normalise: true, scale: 1.5 };
            kit.load(&[router_few::program(hidden)])?;
            for (rows, granted, adds) in [(1, 1, false), (1, 3, true), (5, 7, false), (61, 64, true)] {
                run(kit, &spec, hidden, has_bias, (rows, granted), adds)?;
            }
        }
    }
    Ok(())
}

fn run(
    kit: &mut Kit,
    spec: &RouteSpec,
    hidden: usize,
    has_bias: bool,
    (rows, granted): (usize, usize),
    adds: bool,
) -> Result<(), CudaError> {
    let capacity = granted + 2;
    let with_poison = |mut values: Vec<f32>, width: usize| {
        values.resize(capacity * width, f32::NAN);
        values
    };
    let before = kit.random(rows * hidden, 2.0);
    let added = Element::BF16.rounded(&kit.random(rows * hidden, 1.0));
    let scales: Vec<f32> = kit.random(hidden, 0.3).iter().map(|x| 1.0 + x).collect();
    let weights = Element::BF16.rounded(&kit.random(spec.experts * hidden, 2.0 / (hidden as f32).sqrt()));
    let bias = kit.random(spec.experts, 0.3);
    let residual = kit.upload(&with_poison(before.clone(), hidden), Element::F32)?;
    let more = kit.upload(&with_poison(added.clone(), hidden), Element::BF16)?;
    let (norm_weight, weight) = (kit.upload(&scales, Element::F32)?, kit.upload(&weights, Element::BF16)?);
    let bias_memory = kit.upload(&bias, Element::F32)?;
    let counts = kit.upload_words(&[rows as u32, granted as u32])?;
    let normed = kit.poisoned(capacity * hidden, Element::BF16)?;
    let routes = kit.poisoned(capacity * 2 * spec.top_k, Element::F32)?;
    let arrays = RouterArrays {
        residual: residual.address(),
        added: if adds { more.address() } else { Address::NULL },
        normed: normed.address(),
        weight: weight.address(),
        bias: if has_bias { bias_memory.address() } else { Address::NULL },
        routes: routes.address(),
        granted: counts.address().plus(4),
    };
    let norm = NormWeight { weight: norm_weight.address(), width: hidden, eps: 1e-6 };
    let extent = RowExtent { counts: counts.address(), lanes: 1, lane_rows: capacity };
    // SAFETY: arrays have the sizes that the launcher wants and live until they are read back.
    unsafe { router_few::router_few(&kit.queue(), spec, norm, arrays, extent) }?;

    let name = format!("{spec:?}, hidden {hidden}, bias {has_bias}, {rows} of {granted} rows, adds {adds}");
    let sum: Vec<f64> =
        before.iter().zip(&added).map(|(&x, &more)| f64::from(if adds { x + more } else { x })).collect();
    let found = kit.download(&residual, Element::F32)?;
    kit.near(&format!("residual {name}"), &found[..rows * hidden], &sum, 1e-7);
    kit.untouched(&format!("residual {name}"), &found, rows * hidden);
    let expected: Vec<f64> = sum
        .chunks(hidden)
        .flat_map(|row| {
            let root = 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / hidden as f64 + 1e-6).sqrt();
            row.iter().zip(&scales).map(move |(x, &scale)| x * root * f64::from(scale)).collect::<Vec<_>>()
        })
        .collect();
    let found = kit.download(&normed, Element::BF16)?;
    kit.near(&format!("norm {name}"), &found[..rows * hidden], &expected, 4e-3);
    kit.untouched(&format!("norm {name}"), &found, rows * hidden);

    let found = kit.download(&routes, Element::F32)?;
    let bias = if has_bias { bias } else { vec![0.0; spec.experts] };
    let (mut others, mut found_weights, mut expected_weights) = (0, Vec::new(), Vec::new());
    for (row, found) in expected.chunks(hidden).zip(found.chunks(2 * spec.top_k)) {
        let logit = |weights: &[f32]| row.iter().zip(weights).map(|(x, &w)| x * f64::from(w)).sum::<f64>();
        let logits: Vec<f64> = weights.chunks(hidden).map(logit).collect();
        let wanted = reference(spec, &logits, &bias);
        // Keys that are nearer to each other than f32 tells apart may go either way.
        if wanted.iter().zip(found).any(|(wanted, &found)| wanted.0 as f32 != found) {
            others += 1;
            continue;
        }
        found_weights.extend_from_slice(&found[spec.top_k..]);
        expected_weights.extend(wanted.iter().map(|wanted| wanted.1));
    }
    kit.check(&format!("choices {name}"), others * 20 <= rows, &format!("{others} rows chose otherwise"));
    kit.near(&format!("weights {name}"), &found_weights, &expected_weights, 1e-5);
    let (not_run, padding) = found[rows * 2 * spec.top_k..].split_at((granted - rows) * 2 * spec.top_k);
    let is_empty = |row: &[f32]| {
        let (numbers, weights) = row.split_at(spec.top_k);
        numbers.iter().all(|&n| n == NO_EXPERT) && weights.iter().all(|&w| w == 0.0)
    };
    kit.check(&format!("rows not run {name}"), not_run.chunks(2 * spec.top_k).all(is_empty), "experts");
    kit.untouched(&format!("padding {name}"), padding, 0);
    Ok(())
}
