//! One collective with random inputs: what every member brings, and what it must find, to the bit.

use crate::kit::Kit;
use atom_cuda::launch::exchange::{self, Choosing, Meeting};
use atom_cuda::launch::rows::RowExtent;
use atom_cuda::{CudaError, Device, DeviceMem, Element, Queue, Stream};
use atom_ops::{Comm, NO_EXPERT};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    GatherRows,
    ScatterSum,
    AllReduce,
    GatherColumns,
    DispatchRows,
    CombineRows,
}

pub(crate) const KINDS: [Kind; 6] = [
    Kind::GatherRows,
    Kind::ScatterSum,
    Kind::AllReduce,
    Kind::GatherColumns,
    Kind::DispatchRows,
    Kind::CombineRows,
];

/// A collective and its sizes.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) kind: Kind,
    pub(crate) comm: Comm,
    pub(crate) members: usize,
    pub(crate) lane_rows: usize,
    /// Lanes of a buffer that is summed everywhere.
    pub(crate) lanes: usize,
    pub(crate) width: usize,
    /// Of what travels, and of results where these may be others.
    pub(crate) elements: (Element, Element),
    pub(crate) top_k: usize,
    pub(crate) owners: Vec<usize>,
    /// Columns of each member.
    pub(crate) widths: Vec<usize>,
}

/// What lies on the host.
pub(crate) struct Trial {
    counts: Vec<u32>,
    routes: Vec<f32>, // [group rows, 2 top_k]
    inputs: Vec<Vec<f32>>,
    /// [`POISON`] where nothing may be written.
    expected: Vec<Vec<f32>>,
}

/// A member's arrays on its GPU.
pub(crate) struct Side {
    x: DeviceMem,
    out: DeviceMem,
    counts: DeviceMem,
    routes: DeviceMem,
}

/// What bytes of 0xff are.
const POISON: f32 = f32::from_bits(u32::MAX);

impl Spec {
    pub(crate) fn random(
        kit: &mut Kit,
        kind: Kind,
        members: usize,
        (lane_rows, width): (usize, usize),
    ) -> Self {
        let mut element = || if kit.below(2) == 0 { Element::F32 } else { Element::BF16 };
        let elements = (element(), element());
        let top_k = 1 + kit.below(8);
        // The first lane may hold one expert or none, and so fewer than a row chooses.
        let mut owners: Vec<usize> = vec![0];
        for lane in 0..members {
            let held = if lane == 0 { kit.below(2) } else { kit.below(9) };
            owners.push(owners[lane] + held);
        }
        owners[members] = owners[members].max(top_k);
        let widths = (0..members).map(|_| (width + 3).saturating_sub(kit.below(7))).collect();
        Self {
            kind,
            comm: if kit.below(2) == 0 { Comm::Lane } else { Comm::Group },
            members,
            lane_rows,
            lanes: if kit.below(2) == 0 { 1 } else { 3 },
            width,
            elements,
            top_k,
            owners,
            // Shards of a vocabulary are even or not.
            widths: if kit.below(2) == 0 { vec![width; members] } else { widths },
        }
    }

    fn choosing(&self, side: &Side) -> Choosing<'_> {
        Choosing { routes: side.routes.address(), top_k: self.top_k, owners: &self.owners }
    }

    fn group_rows(&self) -> usize {
        self.members * self.lane_rows
    }

    fn result_element(&self) -> Element {
        match self.kind {
            Kind::ScatterSum | Kind::CombineRows => self.elements.1,
            _ => self.elements.0,
        }
    }

    /// Numbers of a member's input and of its output; none where the input is updated.
    fn sizes(&self, member: usize) -> (usize, usize) {
        let (mine, all) = (self.lane_rows * self.width, self.group_rows() * self.width);
        match self.kind {
            Kind::GatherRows | Kind::DispatchRows => (mine, all),
            Kind::ScatterSum => (all, mine),
            Kind::AllReduce => (self.lanes * mine, 0),
            Kind::GatherColumns => {
                (self.lane_rows * self.widths[member], self.lane_rows * self.widths.iter().sum::<usize>())
            }
            Kind::CombineRows => (all * self.top_k, mine),
        }
    }

    /// Bytes that it needs of a set.
    pub(crate) fn set_bytes(&self) -> usize {
        let (element, rows) = (self.elements.0, self.lane_rows);
        match self.kind {
            Kind::AllReduce => exchange::rows_bytes(self.members, self.lanes * rows, self.width, element),
            Kind::GatherColumns => exchange::columns_bytes(rows, &self.widths, element),
            Kind::CombineRows => exchange::combine_bytes(rows, self.top_k, self.width, element),
            _ => exchange::rows_bytes(self.members, rows, self.width, element),
        }
    }

    /// Queues a member's kernel.
    pub(crate) fn launch(&self, queue: &Queue<'_>, meeting: &Meeting, side: &Side) -> Result<(), CudaError> {
        let (x, out, width) = (side.x.address(), side.out.address(), self.width);
        let (element, sums) = self.elements;
        let lanes = |lanes| RowExtent { counts: side.counts.address(), lanes, lane_rows: self.lane_rows };
        let group = lanes(self.members);
        // SAFETY: arrays have the sizes that the spec says and live until all streams are done; members launch the same, in
        // rounds that come once.
        unsafe {
            match self.kind {
                Kind::GatherRows => exchange::gather_rows(queue, meeting, element, x, width, out, group),
                Kind::ScatterSum => {
                    exchange::scatter_sum(queue, meeting, (element, sums), x, width, out, group)
                }
                Kind::AllReduce => exchange::all_reduce(queue, meeting, element, x, width, lanes(self.lanes)),
                Kind::GatherColumns => {
                    exchange::gather_columns(queue, meeting, element, x, &self.widths, out, lanes(1))
                }
                Kind::DispatchRows => {
                    let choosing = self.choosing(side);
                    exchange::dispatch_rows(queue, meeting, element, (x, width), &choosing, out, group)
                }
                Kind::CombineRows => {
                    let (elements, choosing) = ((element, sums), self.choosing(side));
                    exchange::combine_rows(queue, meeting, elements, (x, width), &choosing, out, group)
                }
            }
        }
    }
}

impl Side {
    /// Room for a spec's arrays on the calling thread's GPU.
    pub(crate) fn new(device: &Device, spec: &Spec, member: usize) -> Result<Self, CudaError> {
        let (x, out) = spec.sizes(member);
        Ok(Self {
            x: DeviceMem::new(device, x * spec.elements.0.bytes())?,
            out: DeviceMem::new(device, out * spec.result_element().bytes())?,
            counts: DeviceMem::new(device, 4 * spec.members.max(spec.lanes))?,
            routes: DeviceMem::new(device, 8 * spec.group_rows() * spec.top_k)?,
        })
    }

    /// Brings a trial's inputs, and poison where its outputs will be.
    pub(crate) fn fill(
        &self,
        stream: &Stream,
        spec: &Spec,
        trial: &Trial,
        me: usize,
    ) -> Result<(), CudaError> {
        let counts: Vec<u8> = trial.counts.iter().flat_map(|count| count.to_le_bytes()).collect();
        self.counts.write(stream, 0, &counts)?;
        self.routes.write(stream, 0, &Element::F32.encode(&trial.routes))?;
        self.x.write(stream, 0, &spec.elements.0.encode(&trial.inputs[me]))?;
        self.out.fill(stream, 0, self.out.bytes(), 0xff)?;
        stream.wait()
    }

    /// Where its output is not what was expected: number of the first such place, what is there, and what should be.
    pub(crate) fn difference(
        &self,
        stream: &Stream,
        spec: &Spec,
        trial: &Trial,
        me: usize,
    ) -> Result<Option<String>, CudaError> {
        let (memory, element) =
            (if spec.kind == Kind::AllReduce { &self.x } else { &self.out }, spec.result_element());
        let mut found = vec![0; memory.bytes()];
        memory.read(stream, 0, &mut found)?;
        let expected = element.encode(&trial.expected[me]);
        assert_eq!(found.len(), expected.len(), "{spec:?}");
        let size = element.bytes();
        let place =
            found.chunks(size).zip(expected.chunks(size)).position(|(found, expected)| found != expected);
        Ok(place.map(|place| {
            let at = place * size..(place + 1) * size;
            let (found, expected) = (&found[at.clone()], &expected[at]);
            format!("member {me}, place {place}: {found:02x?}, not {expected:02x?}; rows {:?}", trial.counts)
        }))
    }
}

impl Trial {
    pub(crate) fn random(kit: &mut Kit, spec: &Spec) -> Self {
        let lanes = match spec.kind {
            Kind::AllReduce => spec.lanes,
            Kind::GatherColumns => 1,
            _ => spec.members,
        };
        let count = |kit: &mut Kit| match kit.below(4) {
            0 => 0,
            1 => spec.lane_rows,
            _ => kit.below(spec.lane_rows + 1),
        };
        let counts: Vec<u32> = (0..lanes).map(|_| count(kit) as u32).collect();
        let mut trial = Self { counts, routes: Vec::new(), inputs: Vec::new(), expected: Vec::new() };
        trial.routes = trial.routes(kit, spec);
        match spec.kind {
            Kind::GatherRows => trial.gather_rows(kit, spec),
            Kind::ScatterSum => trial.scatter_sum(kit, spec),
            Kind::AllReduce => trial.all_reduce(kit, spec),
            Kind::GatherColumns => trial.gather_columns(kit, spec),
            Kind::DispatchRows => trial.dispatch_rows(kit, spec),
            Kind::CombineRows => trial.combine_rows(kit, spec),
        }
        trial
    }

    /// Real rows of the buffer whose lanes the counts are of.
    fn real_rows(&self, spec: &Spec) -> Vec<usize> {
        let lanes = self.counts.iter().enumerate();
        lanes.flat_map(|(lane, &n)| (0..n as usize).map(move |row| lane * spec.lane_rows + row)).collect()
    }

    /// Those of one lane, in such a buffer.
    fn rows_of(&self, spec: &Spec, lane: usize) -> impl Iterator<Item = usize> + use<> {
        let start = lane * spec.lane_rows;
        start..start + self.counts[lane] as usize
    }

    /// Choices in order and their weights; some rows were granted and not run, and have none.
    fn routes(&self, kit: &mut Kit, spec: &Spec) -> Vec<f32> {
        let (top_k, experts) = (spec.top_k, spec.owners[spec.members]);
        let mut routes = vec![POISON; spec.group_rows() * 2 * top_k];
        if !matches!(spec.kind, Kind::DispatchRows | Kind::CombineRows) {
            return routes;
        }
        for row in self.real_rows(spec) {
            let (numbers, weights) = routes[row * 2 * top_k..][..2 * top_k].split_at_mut(top_k);
            if kit.below(6) == 0 {
                numbers.fill(NO_EXPERT);
                weights.fill(0.0);
                continue;
            }
            let mut chosen: Vec<usize> = (0..experts).collect();
            while chosen.len() > top_k {
                chosen.remove(kit.below(chosen.len()));
            }
            numbers.iter_mut().zip(chosen).for_each(|(number, expert)| *number = expert as f32);
            weights.copy_from_slice(&kit.random(top_k, 0.5));
        }
        routes
    }

    /// Choices of a row: place, expert, weight.
    fn choices(&self, spec: &Spec, row: usize) -> Vec<(usize, usize, f32)> {
        let (numbers, weights) = self.routes[row * 2 * spec.top_k..][..2 * spec.top_k].split_at(spec.top_k);
        let chosen = numbers.iter().zip(weights).enumerate().filter(|(_, (number, _))| **number != NO_EXPERT);
        chosen.map(|(place, (&number, &weight))| (place, number as usize, weight)).collect()
    }

    /// A buffer of so many rows: random numbers in those that are named, NaN in the others. Some numbers are -0 on
    /// all members, and where rows are only copied some are no numbers.
    fn buffer(
        kit: &mut Kit,
        spec: &Spec,
        (rows, width): (usize, usize),
        real: impl IntoIterator<Item = usize>,
        is_copied: bool,
    ) -> Vec<f32> {
        let mut values = vec![POISON; rows * width];
        for row in real {
            let numbers = kit.random(width, 1.0);
            for (column, (value, number)) in
                values[row * width..][..width].iter_mut().zip(numbers).enumerate()
            {
                *value = match (row + 5 * column) % 13 {
                    0 => -0.0,
                    7 if is_copied => f32::from_bits(0x7fc1_0000),
                    _ => number,
                };
            }
        }
        spec.elements.0.rounded(&values)
    }

    fn gather_rows(&mut self, kit: &mut Kit, spec: &Spec) {
        let width = spec.width;
        let mut out = vec![POISON; spec.group_rows() * width];
        for lane in 0..spec.members {
            let rows = self.counts[lane] as usize;
            let x = Self::buffer(kit, spec, (spec.lane_rows, width), 0..rows, true);
            out[lane * spec.lane_rows * width..][..rows * width].copy_from_slice(&x[..rows * width]);
            self.inputs.push(x);
        }
        self.expected = vec![out; spec.members];
    }

    /// Sums of all members' numbers at a place, in order.
    fn sum(&self, place: usize) -> f32 {
        let mut numbers = self.inputs.iter().map(|x| x[place]);
        let first = numbers.next().expect("there is a member");
        numbers.fold(first, |sum, x| sum + x)
    }

    fn scatter_sum(&mut self, kit: &mut Kit, spec: &Spec) {
        let (width, real) = (spec.width, self.real_rows(spec));
        for _ in 0..spec.members {
            let x = Self::buffer(kit, spec, (spec.group_rows(), width), real.iter().copied(), false);
            self.inputs.push(x);
        }
        for lane in 0..spec.members {
            let mut out = vec![POISON; spec.lane_rows * width];
            let start = lane * spec.lane_rows * width;
            let numbers = self.counts[lane] as usize * width;
            out[..numbers].iter_mut().enumerate().for_each(|(i, sum)| *sum = self.sum(start + i));
            self.expected.push(out);
        }
    }

    fn all_reduce(&mut self, kit: &mut Kit, spec: &Spec) {
        let (width, real) = (spec.width, self.real_rows(spec));
        for _ in 0..spec.members {
            let rows = spec.lanes * spec.lane_rows;
            self.inputs.push(Self::buffer(kit, spec, (rows, width), real.iter().copied(), false));
        }
        let mut out = vec![POISON; self.inputs[0].len()];
        for row in real {
            (row * width..(row + 1) * width).for_each(|place| out[place] = self.sum(place));
        }
        self.expected = vec![out; spec.members];
    }

    fn gather_columns(&mut self, kit: &mut Kit, spec: &Spec) {
        let (rows, total) = (self.counts[0] as usize, spec.widths.iter().sum::<usize>());
        let mut out = vec![POISON; spec.lane_rows * total];
        let mut start = 0;
        for &width in &spec.widths {
            let x = Self::buffer(kit, spec, (spec.lane_rows, width), 0..rows, true);
            for row in 0..rows {
                out[row * total + start..][..width].copy_from_slice(&x[row * width..][..width]);
            }
            start += width;
            self.inputs.push(x);
        }
        self.expected = vec![out; spec.members];
    }

    fn dispatch_rows(&mut self, kit: &mut Kit, spec: &Spec) {
        let width = spec.width;
        let mut all = Vec::new();
        for lane in 0..spec.members {
            let x = Self::buffer(kit, spec, (spec.lane_rows, width), 0..self.counts[lane] as usize, true);
            all.extend_from_slice(&x);
            self.inputs.push(x);
        }
        for member in 0..spec.members {
            let held = spec.owners[member]..spec.owners[member + 1];
            let mut out = vec![POISON; all.len()];
            for row in self.real_rows(spec) {
                if self.choices(spec, row).iter().any(|(_, expert, _)| held.contains(expert)) {
                    out[row * width..][..width].copy_from_slice(&all[row * width..][..width]);
                }
            }
            self.expected.push(out);
        }
    }

    fn combine_rows(&mut self, kit: &mut Kit, spec: &Spec) {
        let (width, group_rows) = (spec.width, spec.group_rows());
        self.inputs = (0..spec.members).map(|_| vec![POISON; group_rows * spec.top_k * width]).collect();
        for lane in 0..spec.members {
            let mut out = vec![POISON; spec.lane_rows * width];
            for row in self.rows_of(spec, lane) {
                let sums = &mut out[(row - lane * spec.lane_rows) * width..][..width];
                sums.fill(0.0);
                for (choice, expert, weight) in self.choices(spec, row) {
                    let owner = spec.owners.partition_point(|&first| first <= expert) - 1;
                    let y = spec.elements.0.rounded(&kit.random(width, 1.0));
                    let slot = row * spec.top_k + choice;
                    self.inputs[owner][slot * width..][..width].copy_from_slice(&y);
                    sums.iter_mut().zip(&y).for_each(|(sum, &y)| *sum = weight.mul_add(y, *sum));
                }
            }
            self.expected.push(out);
        }
    }
}
