"""What things cost: transfers, kernels, memory, the work of a step; measured, fitted or by data sheets."""
