//! The tools of operators over real processes: commands, metrics, alerts and pages.

mod alerts;
mod doctor;
mod metrics;
mod operations;
mod operator;
mod page;
mod tenants;
mod terminal;
mod tracing;
