//! The master as its callers meet it: a `Pool` or a whole kvmaster in this process.

#[path = "../support/mod.rs"]
mod support;

mod addresses;
mod drain_room;
mod drains;
mod full_pool;
mod hostile_streams;
mod leases;
mod leases_over_terms;
mod loads_over_terms;
mod media;
mod media_attachments;
mod media_evacuation;
mod media_leases;
mod media_losses;
mod media_pressure;
mod media_removals;
mod registrations;
mod removals;
mod replicas;
mod room;
mod scans;
mod silence;
mod stop;
mod store_stall;
mod tenancy;
mod tenancy_changes;
mod tenancy_media;
mod terms;
mod undrain;
