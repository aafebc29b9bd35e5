//! Routers.

use crate::kit::Kit;
use atom_cuda::launch::route;
use atom_cuda::launch::rows::RowExtent;
use atom_cuda::{Address, CudaError, Element};
use atom_ops::{NO_EXPERT, RouteSpec};

/// Experts, choices, groups, groups that stay.
const SHAPES: &[(usize, usize, usize, usize)] = &[
    (5, 2, 1, 1),
    (16, 4, 4, 2),
    (32, 32, 1, 1),
    (128, 8, 1, 1),
    (64, 6, 8, 3),
    (12, 3, 12, 5),
    (256, 8, 8, 4),
    (160, 8, 1, 1),
    (300, 7, 100, 40),
    (512, 10, 1, 1),
];

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    for &(experts, top_k, groups, groups_kept) in SHAPES {
        for (is_sigmoid, has_bias, normalise) in [
            (false, false, true),
            (false, false, false),
            (true, true, true),
            (true, false, false),
            (false, true, true),
        ] {
            let scale = if normalise { 1.0 } else { 2.5 };
            let spec = RouteSpec { experts, top_k, is_sigmoid, groups, groups_kept, normalise, scale };
            for rows in [1, 7, 300] {
                random(kit, &spec, has_bias, rows)?;
            }
        }
    }
    for (experts, top_k) in [(5, 2), (128, 8), (300, 7), (512, 32)] {
        for rows in [0, 1, 7, 300] {
            counted(kit, (experts, top_k), rows)?;
        }
    }
    edges(kit)
}

/// The number of different experts among routes made here, some of them of nobody, with more behind the real rows; twice,
/// since it adds to what is there.
fn counted(kit: &mut Kit, (experts, top_k): (usize, usize), rows: usize) -> Result<(), CudaError> {
    let capacity = rows + 3;
    let mut routes = vec![0.5; capacity * 2 * top_k];
    let mut different = std::collections::BTreeSet::new();
    for (row, routes) in routes.chunks_mut(2 * top_k).enumerate() {
        for number in &mut routes[..top_k] {
            let expert = kit.below(experts + 1);
            *number = if expert == experts { NO_EXPERT } else { expert as f32 };
            if row < rows && expert < experts {
                different.insert(expert);
            }
        }
    }
    let memory = kit.upload(&routes, Element::F32)?;
    let counts = kit.upload_words(&[rows as u32, 5, 0])?;
    let extent = RowExtent { counts: counts.address(), lanes: 1, lane_rows: capacity };
    let (is_sigmoid, groups, groups_kept, normalise, scale) = (false, 1, 1, true, 1.0);
    let spec = RouteSpec { experts, top_k, is_sigmoid, groups, groups_kept, normalise, scale };
    let total = kit.upload_words(&[100, 0])?;
    for _ in 0..2 {
        // SAFETY: routes have the rows of the extent, and all of it lives until it is read back.
        unsafe { route::count_experts(&kit.queue(), &spec, memory.address(), extent, total.address()) }?;
    }
    let found = kit.download_words(&total)?;
    let wanted = [100 + 2 * different.len() as u32, 0];
    let name = format!("different experts, {rows} rows choose {top_k} of {experts}");
    kit.check(&name, found == wanted, &format!("{found:?}, not {wanted:?}"));
    Ok(())
}

fn run(
    kit: &Kit,
    spec: &RouteSpec,
    logits: &[f32],
    bias: Option<&[f32]>,
    granted: usize,
) -> Result<Vec<f32>, CudaError> {
    let rows = logits.len() / spec.experts;
    let capacity = granted + 3;
    let mut padded = vec![f32::NAN; capacity * spec.experts];
    padded[..logits.len()].copy_from_slice(logits);
    let memory = kit.upload(&padded, Element::F32)?;
    let bias = bias.map(|bias| kit.upload(bias, Element::F32)).transpose()?;
    let counts = kit.upload_words(&[rows as u32, granted as u32])?;
    let out = kit.poisoned(capacity * 2 * spec.top_k, Element::F32)?;
    let inputs = (memory.address(), bias.as_ref().map_or(Address::NULL, atom_cuda::DeviceMem::address));
    let extent = RowExtent { counts: counts.address(), lanes: 1, lane_rows: capacity };
    // SAFETY: arrays have the sizes that the launcher wants and live until they are read back.
    unsafe { route::route(&kit.queue(), spec, inputs, out.address(), counts.address().plus(4), extent) }?;
    kit.download(&out, Element::F32)
}

fn random(kit: &mut Kit, spec: &RouteSpec, has_bias: bool, rows: usize) -> Result<(), CudaError> {
    let logits = kit.random(rows * spec.experts, 3.0);
    let bias = if has_bias { kit.random(spec.experts, 0.3) } else { vec![0.0; spec.experts] };
    let found = run(kit, spec, &logits, has_bias.then_some(&bias[..]), rows + 2)?;
    let name = format!("{spec:?}, bias {has_bias}, {rows} rows");
    let (mut others, mut weights, mut expected) = (0, Vec::new(), Vec::new());
    for (logits, found) in logits.chunks(spec.experts).zip(found.chunks(2 * spec.top_k)) {
        let logits: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
        let wanted = reference(spec, &logits, &bias);
        // In f32 two keys may come closer than in f64; then another choice is right as well, and rare.
        if wanted.iter().zip(found).any(|(wanted, &found)| wanted.0 as f32 != found) {
            others += 1;
            continue;
        }
        weights.extend_from_slice(&found[spec.top_k..]);
        expected.extend(wanted.iter().map(|wanted| wanted.1));
    }
    kit.check(&format!("choices {name}"), others * 100 <= rows, &format!("{others} rows chose otherwise"));
    kit.near(&format!("weights {name}"), &weights, &expected, 2e-6);
    let (not_run, padding) = found[rows * 2 * spec.top_k..].split_at(4 * spec.top_k);
    let is_empty = |row: &[f32]| {
        let (numbers, weights) = row.split_at(spec.top_k);
        numbers.iter().all(|&n| n == NO_EXPERT) && weights.iter().all(|&w| w == 0.0)
    };
    kit.check(&format!("rows not run {name}"), not_run.chunks(2 * spec.top_k).all(is_empty), "experts");
    kit.untouched(&format!("padding {name}"), padding, 0);
    Ok(())
}

/// Experts in ascending order and their weights, straight from the rule.
pub(crate) fn reference(spec: &RouteSpec, logits: &[f64], bias: &[f32]) -> Vec<(usize, f64)> {
    let total: f64 = logits.iter().map(|x| x.exp()).sum();
    let score = |x: &f64| if spec.is_sigmoid { 1.0 / (1.0 + (-x).exp()) } else { x.exp() / total };
    let scores: Vec<f64> = logits.iter().map(score).collect();
    let keys: Vec<f64> = scores.iter().zip(bias).map(|(s, &b)| s + f64::from(b)).collect();
    let best = |keys: &[f64], mut order: Vec<usize>, count: usize| {
        order.sort_by(|&a, &b| keys[b].total_cmp(&keys[a]).then(a.cmp(&b)));
        order.truncate(count);
        order.sort_unstable();
        order
    };
    let size = spec.experts / spec.groups;
    let two_best = |keys: &[f64]| {
        let mut keys = keys.to_vec();
        keys.sort_by(|a, b| b.total_cmp(a));
        keys.iter().take(2).sum()
    };
    let groups: Vec<f64> = keys.chunks(size).map(two_best).collect();
    let kept = best(&groups, (0..spec.groups).collect(), spec.groups_kept);
    let candidates = (0..spec.experts).filter(|e| kept.contains(&(e / size))).collect();
    let chosen = best(&keys, candidates, spec.top_k);
    let sum: f64 = if spec.normalise { chosen.iter().map(|&e| scores[e]).sum() } else { 1.0 };
    chosen.into_iter().map(|e| (e, scores[e] / sum * f64::from(spec.scale))).collect()
}

/// Ties, values that are no numbers, and values of any size: what the CPU does.
fn edges(kit: &mut Kit) -> Result<(), CudaError> {
    let plain = |experts: usize, top_k: usize, is_sigmoid: bool| RouteSpec {
        experts,
        top_k,
        is_sigmoid,
        groups: 1,
        groups_kept: 1,
        normalise: true,
        scale: 1.0,
    };
    for is_sigmoid in [false, true] {
        let found = run(kit, &plain(20, 3, is_sigmoid), &[0.5; 20], None, 1)?;
        kit.check("of equal scores the first", found[..3] == [0.0, 1.0, 2.0], &format!("{found:?}"));
        let grouped = RouteSpec { groups: 5, groups_kept: 2, ..plain(20, 5, is_sigmoid) };
        let mut logits = [0.5; 20];
        logits[13] = 2.0;
        let found = run(kit, &grouped, &logits, None, 1)?;
        let holds = found[..5] == [0.0, 1.0, 2.0, 3.0, 13.0];
        kit.check("of equal groups the first", holds, &format!("{found:?}"));
        for (groups, groups_kept) in [(1, 1), (4, 1), (16, 5)] {
            let spec = RouteSpec { groups, groups_kept, ..plain(16, 4, is_sigmoid) };
            for poisoned in [vec![3], vec![0, 15], (0..16).collect()] {
                let mut logits = kit.random(16, 1.0);
                poisoned.iter().for_each(|&i| logits[i] = f32::NAN);
                for bias in [None, Some(&logits[..])] {
                    let found = run(kit, &spec, &logits, bias, 1)?;
                    let numbers = &found[..4];
                    let differ = numbers.is_sorted_by(|a, b| a < b) && numbers[0] >= 0.0 && numbers[3] < 16.0;
                    let holds = differ && found[4..8].iter().all(|weight| weight.is_nan());
                    kit.check("NaN shows and is routed", holds, &format!("{spec:?} {found:?}"));
                }
            }
        }
    }
    let found = run(kit, &plain(5, 2, false), &[-0.0, 0.0, -1.0, 0.0, -0.0], None, 1)?;
    kit.check("both zeros are equal", found[..4] == [0.0, 1.0, 0.5, 0.5], &format!("{found:?}"));
    let mut logits = [1e30; 10];
    (logits[7], logits[2]) = (2e30, f32::NEG_INFINITY);
    let found = run(kit, &plain(10, 2, false), &logits, None, 1)?;
    kit.check("logits of any size", found[..4] == [0.0, 7.0, 0.0, 1.0], &format!("{found:?}"));
    let found = run(kit, &plain(4, 2, true), &[-1e30; 4], None, 1)?;
    kit.check("sigmoids of 0", found[..2] == [0.0, 1.0] && found[2] < 1e-18, &format!("{found:?}"));
    let spec = RouteSpec { groups: 2, ..plain(8, 4, true) };
    let logits = [9.0, 9.0, -200.0, -200.0, 5.0, 5.0, 5.0, 5.0];
    for bias in [None, Some(&[0.0, 0.0, -1e30, f32::NEG_INFINITY, 0.0, 0.0, 0.0, 0.0][..])] {
        let found = run(kit, &spec, &logits, bias, 1)?;
        let holds = found[..4] == [0.0, 1.0, 2.0, 3.0] && (found[4] - 0.5).abs() < 1e-6;
        kit.check("low experts of a group that stays", holds, &format!("{found:?}"));
    }
    Ok(())
}
